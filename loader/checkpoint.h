#pragma once
// The tensors of a model directory: in one model.safetensors, in the shards an index names, or in all
// *.safetensors of the directory. Opening it reads only the files' headers. An index may name only
// files beside it, and must agree with them; the same tensor in two files is refused. Read-only
// afterwards; any thread may look up and read.

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "loader/safetensors.h"

namespace poise {

// A tensor and the file it lies in.
struct TensorPlace {
  const StoredTensor* tensor = nullptr;
  const SafetensorsFile* file = nullptr;
  bool listed = true;  // false: there is an index, and it does not name this tensor
};

// Fails if there is an index that does not name this tensor.
void check_listed(const TensorPlace& place, const std::string& what);

class Checkpoint {
 public:
  explicit Checkpoint(const std::filesystem::path& directory);

  // Nothing if the model has no tensor of this name.
  const TensorPlace* find(std::string_view name) const;
  const std::map<std::string, TensorPlace, std::less<>>& tensors() const { return tensors_; }
  // What was ignored, one sentence each.
  const std::vector<std::string>& notices() const { return notices_; }
  // Fails if a file was written to since it was opened.
  void check_unchanged() const;

 private:
  using WeightMap = std::map<std::string, std::string, std::less<>>;  // tensor to file

  void open(const std::filesystem::path& directory, const std::vector<std::string>& names);
  void compare_with_index(const WeightMap& index, const std::string& what);

  std::vector<SafetensorsFile> files_;  // not changed once `tensors_` points into it
  std::map<std::string, TensorPlace, std::less<>> tensors_;
  std::vector<std::string> notices_;
};

}  // namespace poise
