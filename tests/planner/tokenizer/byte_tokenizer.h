#pragma once
// A tokenizer of bytes, small enough to write ids by hand, and a directory of its own for a test.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/files/json.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise::testing_support {

// Gone, with all it holds, at the end.
class ScratchDirectory {
 public:
  explicit ScratchDirectory(
      const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string name = (parent / "poise-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("no scratch directory");
    }
    path_ = name;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  std::filesystem::path write(std::string_view name, std::string_view content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline constexpr TokenId kEos = 2;       // also BOS, as in OPT
inline constexpr TokenId kAb = 260;      // "ab"
inline constexpr TokenId kAbc = 261;     // "abc"
inline constexpr TokenId kBeyond = 270;  // a row of the model without a token
inline constexpr std::int32_t kRows = 300;
constexpr TokenId byte_id(unsigned char byte) { return 4 + byte; }

// GPT-2's way of writing a byte as a printable character.
inline std::string alphabet_character(int byte) {
  const auto prints = [](int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  };
  int code = byte;
  if (!prints(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) {
      code += prints(b) ? 0 : 1;
    }
  }
  if (code < 0x80) {
    return std::string(1, static_cast<char>(code));
  }
  return {static_cast<char>(0xc0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3f))};
}

// Ids: 0 <s>, 1 <pad>, 2 </s>, 3 <unk>, 4 + b the byte b, 260 "ab", 261 "abc". </s> and <pad> are
// special, as in OPT; </s> is put before every text if `add_bos`.
inline Tokenizer byte_tokenizer(bool add_bos = true) {
  const ScratchDirectory directory;
  nlohmann::json vocabulary{{"<s>", 0}, {"<pad>", 1}, {"</s>", 2}, {"<unk>", 3}};
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary[alphabet_character(byte)] = byte_id(static_cast<unsigned char>(byte));
  }
  vocabulary["ab"] = kAb;
  vocabulary["abc"] = kAbc;
  directory.write("vocab.json", vocabulary.dump());
  directory.write("merges.txt", "#version: 0.2\na b\nab c\n");
  directory.write("tokenizer_config.json", nlohmann::json{{"bos_token", "</s>"},
                                                          {"eos_token", "</s>"},
                                                          {"unk_token", "</s>"},
                                                          {"pad_token", "<pad>"},
                                                          {"add_prefix_space", false},
                                                          {"add_bos_token", add_bos},
                                                          {"tokenizer_class", "GPT2Tokenizer"}}
                                               .dump());
  return Tokenizer::load(directory.path(), kRows);
}

}  // namespace poise::testing_support
