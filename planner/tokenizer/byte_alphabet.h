#pragma once
// GPT-2's alphabet: each of the 256 bytes written as one printable character, so that vocabularies
// of bytes are text. "Ġ" is a space, "Ċ" a newline, "é" the byte 0xE9. Pure functions.

#include <optional>
#include <string>
#include <string_view>

namespace poise {

// The bytes that `token` stands for, or nothing if some character of it is not of the alphabet.
// REQUIRES: valid UTF-8.
std::optional<std::string> alphabet_to_bytes(std::string_view token);

}  // namespace poise
