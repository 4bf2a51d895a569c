// The library's description of its own interface. Python compares it with what it read in interface.h, and refuses a
// library that differs.

#pragma once

#include <string>

#include "interface.h"

namespace {

// "name number"
void describe(std::string& out, const char* name, size_t number) {
  out += std::string(name) + " " + std::to_string(number) + "\n";
}

}  // namespace
