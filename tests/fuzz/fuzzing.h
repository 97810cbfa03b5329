#pragma once
// What the fuzz targets have in common. A target is one file; libFuzzer calls its `run` in one thread with bytes of its
// own making. A target ends the process if it sees a defect: a sanitizer's report, an exception
// that is no Failure (`check` throws one), or an `expect` that does not hold. A refusal is a Failure whose sentence fits
// one line of a terminal.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/files/regular_file.h"
#include "common/trouble.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace poise::fuzzing {

using Input = std::span<const std::uint8_t>;

class Target {
 public:
  using Run = void (*)(Input);
  // Makes another input of one that led somewhere.
  using Mutate = std::size_t (*)(std::uint8_t* data, std::size_t size, std::size_t most,
                                 unsigned seed);

  // Named in the environment by POISE_FUZZ_TARGET.
  Target(const char* name, Run run, Mutate mutate = as_libfuzzer_does)
      : run_(run), mutate_(mutate) {
    const char* chosen = std::getenv("POISE_FUZZ_TARGET");
    if (chosen != nullptr && std::strcmp(chosen, name) == 0) {
      chosen_ = this;
    }
  }
  // The one that is to run; ends the process where none of this program's was named.
  static const Target& chosen() {
    if (chosen_ == nullptr) {
      std::fprintf(stderr, "POISE_FUZZ_TARGET names no target: tests/fuzz/run.py sets it\n");
      std::exit(2);
    }
    return *chosen_;
  }
  void run(Input input) const { run_(input); }
  std::size_t mutate(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) const {
    return mutate_(data, size, most, seed);
  }

 private:
  static std::size_t as_libfuzzer_does(std::uint8_t* data, std::size_t size, std::size_t most,
                                       unsigned /*seed*/) {
    return LLVMFuzzerMutate(data, size, most);
  }

  static inline const Target* chosen_ = nullptr;
  Run run_;
  Mutate mutate_;
};

inline std::string_view text_of(Input input) {
  return {reinterpret_cast<const char*>(input.data()), input.size()};
}

// What must hold for every input. `seen`: what was found instead.
inline void expect(bool condition, const char* rule, std::string_view seen = "") {
  if (!condition) {
    std::fprintf(stderr, "does not hold: %s: %.*s\n", rule, static_cast<int>(seen.size()),
                 seen.data());
    std::abort();
  }
}

// UTF-8 that stays on its line in a terminal; `shown` marks with "…" where it cut.
inline bool is_line(std::string_view text) {
  constexpr std::string_view kCut = "…";
  std::string plain(text);
  for (std::size_t at = 0; (at = plain.find(kCut, at)) != std::string::npos;) {
    plain.erase(at, kCut.size());
  }
  return shown(plain, plain.size() + 1) == plain;
}

// A sentence for a user: one line of a length that can be read.
inline void expect_sentence(std::string_view sentence) {
  constexpr std::size_t kLongest = 1500;
  expect(!sentence.empty() && sentence.size() <= kLongest && is_line(sentence),
         "a refusal is one line of text", sentence);
}

// The sentence that `act` is refused with; nothing if it is not.
template <typename Act>
std::optional<std::string> refusal(Act&& act) {
  try {
    act();
  } catch (const Failure& failure) {
    expect_sentence(failure.what());
    return failure.what();
  }
  return std::nullopt;
}

// The input's parts between NUL bytes; the last part is what is left, NULs included.
inline std::vector<std::string_view> parts_of(Input input, std::size_t most) {
  std::vector<std::string_view> parts;
  std::string_view rest = text_of(input);
  while (parts.size() + 1 < most) {
    const std::size_t end = rest.find('\0');
    if (end == std::string_view::npos) {
      break;
    }
    parts.push_back(rest.substr(0, end));
    rest.remove_prefix(end + 1);
  }
  parts.push_back(rest);
  return parts;
}

// A directory of files for the code under test to open. tests/fuzz/run.py names the place (TMPDIR), in memory, and
// removes what a target that was killed leaves there.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "poise-fuzz-XXXXXX").string();
    check(::mkdtemp(name.data()) != nullptr, "a directory for a fuzz target");
    path_ = name;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

  // The file then holds `content` and, where `size` is larger, zeros up to there.
  void write(const char* name, std::string_view content, std::uint64_t size = 0) const {
    const int file = open((path_ / name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const auto end = static_cast<off_t>(std::max<std::uint64_t>(size, content.size()));
    const bool written =
        file >= 0 &&
        pwrite(file, content.data(), content.size(), 0) == static_cast<ssize_t>(content.size()) &&
        ftruncate(file, static_cast<off_t>(content.size())) == 0 &&  // what a longer input left
        ftruncate(file, end) == 0;
    check(written && close(file) == 0, "a fuzz target writes its files");
  }
  void remove(const char* name) const { unlink((path_ / name).c_str()); }

 private:
  std::filesystem::path path_;
};

// For mutators: a value in the input's bytes.
template <typename T>
T read_at(const std::uint8_t* data, std::size_t at) {
  T value;
  std::memcpy(&value, data + at, sizeof value);
  return value;
}
template <typename T>
void write_at(std::uint8_t* data, std::size_t at, const T& value) {
  std::memcpy(data + at, &value, sizeof value);
}

}  // namespace poise::fuzzing
