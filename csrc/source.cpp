// SPDX-License-Identifier: Apache-2.0
// What this library was built from, so that nobody calls one with other functions.

extern "C" __attribute__((visibility("default"))) const char* reasoncache_source() {
  return REASONCACHE_SOURCE;
}
