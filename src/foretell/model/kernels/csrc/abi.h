// The library's description of its own interface. Python compares it with structures.py and refuses a library that
// differs.

#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "interface.h"

namespace {

struct Field {
  size_t offset, size;
};

#define FORETELL_FIELD(Struct, name) \
  Field { offsetof(Struct, name), sizeof(Struct::name) }

// "Name size offset:size offset:size ..."
void describe_struct(std::string& out, const char* name, size_t size, std::initializer_list<Field> fields) {
  out += std::string(name) + " " + std::to_string(size);
  for (const Field& field : fields) out += " " + std::to_string(field.offset) + ":" + std::to_string(field.size);
  out += "\n";
}

template <class T>
constexpr char letter() {
  if constexpr (std::is_pointer_v<T>)
    return 'p';
  else if constexpr (std::is_same_v<T, int32_t>)
    return 'i';
  else if constexpr (std::is_same_v<T, int64_t>)
    return 'l';
  else if constexpr (std::is_same_v<T, float>)
    return 'f';
  else {
    static_assert(std::is_void_v<T>, "structures.py has no letter for this type");
    return 'v';
  }
}

// "name letters": the type of the result, then those of the arguments.
template <class Result, class... Arguments>
void describe_function(std::string& out, const char* name, Result (*)(Arguments...)) {
  out += std::string(name) + " " + std::string{letter<Result>(), letter<Arguments>()...} + "\n";
}

void describe_constant(std::string& out, const char* name, int value) {
  out += std::string(name) + " " + std::to_string(value) + "\n";
}

}  // namespace
