#include "common/files/sha256.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

namespace poise {
namespace {

std::string hex_of(std::string_view text) { return to_hex(sha256(std::as_bytes(std::span(text)))); }

TEST(Sha256, TheStandardsExamplesComeOut) {
  EXPECT_EQ(hex_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex_of(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, TheProcessorsInstructionsGiveWhatThePortableCodeGives) {
  if (!detail::has_sha_instructions()) {
    GTEST_SKIP() << "this processor has none";
  }
  std::mt19937 random(7);
  for (std::size_t blocks = 0; blocks < 40; ++blocks) {
    std::vector<std::byte> data(blocks * 64);
    std::ranges::generate(data, [&] { return static_cast<std::byte>(random()); });
    std::array<std::uint32_t, 8> portable;
    std::ranges::generate(portable, [&] { return random(); });
    std::array<std::uint32_t, 8> native = portable;
    detail::sha256_blocks_portable(portable.data(), data.data(), blocks);
    detail::sha256_blocks_native(native.data(), data.data(), blocks);
    EXPECT_EQ(portable, native) << blocks;
  }
}

TEST(Sha256, HowTheBytesArriveDoesNotMatter) {
  std::vector<std::byte> data(1000);
  std::mt19937 random(8);
  std::ranges::generate(data, [&] { return static_cast<std::byte>(random()); });
  for (std::size_t length = 0; length <= data.size(); length += 1 + length / 7) {
    const std::span<const std::byte> bytes(data.data(), length);
    Sha256 in_pieces;
    for (std::size_t at = 0; at < length;) {
      const std::size_t piece = std::min<std::size_t>(length - at, random() % 150);
      in_pieces.update(bytes.subspan(at, piece));
      at += piece;
    }
    EXPECT_EQ(in_pieces.finish(), sha256(bytes)) << length;
  }
}

TEST(Sha256, APairIsTheTwoDigests) {
  std::vector<std::byte> data(2000);
  std::mt19937 random(9);
  std::ranges::generate(data, [&] { return static_cast<std::byte>(random()); });
  for (const std::size_t length : {0, 1, 55, 56, 63, 64, 65, 128, 1000}) {
    const std::span<const std::byte> a = std::span(data).first(length);
    const std::span<const std::byte> b = std::span(data).last(length);
    const std::array<Digest, 2> pair = sha256_pair(a, b);
    EXPECT_EQ(pair[0], sha256(a)) << length;
    EXPECT_EQ(pair[1], sha256(b)) << length;
  }
}

}  // namespace
}  // namespace poise
