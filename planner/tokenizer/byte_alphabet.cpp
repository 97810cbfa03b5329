#include "planner/tokenizer/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "planner/tokenizer/unicode.h"

namespace poise {
namespace {

// Characters of the alphabet lie below this: those bytes that are no printable Latin-1 character
// are numbered from U+0100 on, and there are 68 of them.
constexpr char32_t kEndOfAlphabet = 0x100 + 68;
constexpr std::int16_t kNone = -1;

constexpr bool is_itself(unsigned byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr auto kByteOf = [] {
  std::array<std::int16_t, kEndOfAlphabet> bytes{};
  bytes.fill(kNone);
  std::size_t others = 0;
  for (unsigned byte = 0; byte < 256; ++byte) {
    bytes[is_itself(byte) ? byte : 0x100 + others++] = static_cast<std::int16_t>(byte);
  }
  return bytes;
}();
static_assert(kByteOf[kEndOfAlphabet - 1] == 0xAD, "the soft hyphen is the last of the 68");
static_assert(kByteOf[0x120] == ' ' && kByteOf[0x10A] == '\n');

}  // namespace

std::optional<std::string> alphabet_to_bytes(std::string_view token) {
  std::string bytes;
  bytes.reserve(token.size());
  for (std::size_t at = 0; at < token.size();) {
    const CodePoint c = code_point_at(token, at);
    if (c.value >= kEndOfAlphabet || kByteOf[c.value] == kNone) {
      return std::nullopt;
    }
    bytes.push_back(static_cast<char>(kByteOf[c.value]));
    at += c.bytes;
  }
  return bytes;
}

}  // namespace poise
