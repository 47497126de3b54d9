// SPDX-License-Identifier: Apache-2.0
#include "structure/forest.h"

#include <charconv>

#include "text/utf8.h"

namespace reasoncache {
namespace {

void append_number(size_t value, std::string& out) {
    char digits[20];
    const auto end = std::to_chars(digits, digits + sizeof digits, value);
    out.append(digits, end.ptr);
}

}  // namespace

std::string Forest::serialise(const NodeList& roots) const {
    std::string out;
    out.reserve(8 * nodes_.size());
    std::vector<NodeId> later;  // right siblings of the nodes above
    NodeId next = roots.first;
    while (next != kNoNode) {
        const Node& node = nodes_[next];
        append_number(node.num_children, out);
        out.push_back(',');
        append_number(node.label.size(), out);
        out.push_back(':');
        encode_utf8(node.label, out);
        if (node.num_children > 0) {
            later.push_back(node.next);
            next = node.first_child;
        } else {
            next = node.next;
        }
        while (next == kNoNode && !later.empty()) {
            next = later.back();
            later.pop_back();
        }
    }
    return out;
}

}  // namespace reasoncache
