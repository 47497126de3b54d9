// SPDX-License-Identifier: Apache-2.0
// Labelled ordered trees in one block of memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reasoncache {

using NodeId = uint32_t;
inline constexpr NodeId kNoNode = UINT32_MAX;

// Siblings in order. A node stands in one list only.
struct NodeList {
    NodeId first = kNoNode;
    NodeId last = kNoNode;
    uint32_t size = 0;
};

class Forest {
public:
    Forest() { nodes_.reserve(64); }

    // Labels must outlive the forest.
    NodeId add(std::u32string_view label, const NodeList& children = {}) {
        nodes_.push_back({label, children.size, children.first, kNoNode});
        return static_cast<NodeId>(nodes_.size() - 1);
    }

    void append(NodeList& list, NodeId node) {
        if (list.size++ == 0) {
            list.first = node;
        } else {
            nodes_[list.last].next = node;
        }
        list.last = node;
    }

    // `tail` goes behind `list`.
    void extend(NodeList& list, const NodeList& tail) {
        if (tail.size == 0) return;
        if (list.size == 0) {
            list = tail;
            return;
        }
        nodes_[list.last].next = tail.first;
        list.last = tail.last;
        list.size += tail.size;
    }

    size_t size() const { return nodes_.size(); }
    bool is_leaf(NodeId node) const { return nodes_[node].num_children == 0; }

    // The bytes of serialise() in tree.py. Keeps its own stack: depth costs no
    // recursion. Throws std::bad_alloc only.
    std::string serialise(const NodeList& roots) const;

private:
    struct Node {
        std::u32string_view label;
        uint32_t num_children;
        NodeId first_child;
        NodeId next;
    };

    std::vector<Node> nodes_;
};

}  // namespace reasoncache
