#pragma once
// One *.safetensors file, whose header is read strictly: each tensor's name, type, shape and place.
// The tensors' bytes must cover the file from the header to its end without hole or overlap. It is
// stricter than the reference reader: no name twice, no leading space, no unknown field, no type of
// unknown size. An error is one sentence that names file and tensor. Only the header is read here;
// its size and counts are bounded before memory is taken for
// them.
//
//   | header bytes u64 | header: one JSON object, padded with spaces | tensors' bytes |

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "common/files/regular_file.h"
#include "common/units.h"

namespace poise {

inline constexpr Bytes kMaxSafetensorsHeader{100'000'000};  // the format's own limit
inline constexpr std::int64_t kMaxTensors = 1 << 15;        // in one file

struct StoredTensor {
  std::string name;
  std::string dtype;  // as the file spells it: "F16"
  std::vector<std::int64_t> shape;
  std::uint64_t begin;  // byte of the file
  Bytes bytes;
};

// "[768, 3072]", as PyTorch prints it.
std::string shape_text(const std::vector<std::int64_t>& shape);

// The tensors of a header, in the order of their bytes. `data_begin` is where the tensors' bytes
// begin in the file, `file_bytes` where they must end. `what` begins each sentence. Pure.
std::vector<StoredTensor> parse_safetensors_header(std::string_view header,
                                                   std::uint64_t data_begin,
                                                   std::uint64_t file_bytes,
                                                   const std::string& what);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const RegularFile& file() const { return file_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }

 private:
  RegularFile file_;
  std::vector<StoredTensor> tensors_;
};

}  // namespace poise
