#include "loader/checkpoint.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr std::string_view kExtension = ".safetensors";
constexpr std::size_t kMaxFiles = 512;  // each is an open descriptor

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::symlink_status(path, ignored).type() !=
         std::filesystem::file_type::not_found;
}

void check_file_name(const std::string& name, const std::string& tensor, const std::string& what) {
  const bool plain = name.find('/') == std::string::npos && name.find('\0') == std::string::npos &&
                     name.find('\\') == std::string::npos && !name.starts_with('.') &&
                     name.size() <= 255;
  if (!plain) {
    fail("{}: tensor {} is said to lie in \"{}\": only names of files beside the index are allowed",
         what, shown(tensor), shown(name));
  }
  if (!name.ends_with(kExtension) || name.size() == kExtension.size()) {
    fail("{}: tensor {} is said to lie in \"{}\", which is no *.safetensors", what, shown(tensor),
         shown(name));
  }
}

std::map<std::string, std::string, std::less<>> read_index(const std::filesystem::path& path,
                                                           const std::string& what) {
  const nlohmann::json document =
      read_json_file(path, {.size = kMiB * 32, .depth = 8, .values = 4 * kMaxTensors});
  const auto weight_map = JsonObject(document, what).object("weight_map");
  if (!weight_map || weight_map->json().empty()) {
    fail("{}: \"weight_map\" is missing or empty: it must name each tensor's file", what);
  }
  std::map<std::string, std::string, std::less<>> index;
  for (const auto& [tensor, file] : weight_map->json().items()) {
    if (!file.is_string()) {
      fail("{}: the file of tensor {} must be a string, not {}", what, shown(tensor),
           described(file));
    }
    check_file_name(file.get_ref<const std::string&>(), tensor, what);
    index.emplace(tensor, file.get<std::string>());
  }
  return index;
}

std::vector<std::string> every_safetensors_of(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  std::set<std::string> others;
  std::error_code problem;
  for (const auto& file : std::filesystem::directory_iterator(directory, problem)) {
    const std::string name = file.path().filename().string();
    if (name.ends_with(kExtension) && !name.starts_with('.')) {
      names.push_back(name);
    } else if (name.ends_with(".bin") || name.ends_with(".pt") || name.ends_with(".pth")) {
      others.insert(name);
    }
  }
  if (problem) {
    fail("the model directory {} cannot be listed: {}", shown(directory.string(), 300),
         problem.message());
  }
  if (names.empty() && !others.empty()) {
    fail(
        "the model directory {} has no *.safetensors, only {}: pickles are not read; convert it "
        "with transformers' save_pretrained",
        shown(directory.string(), 300), shown(*others.begin()));
  }
  if (names.empty()) {
    fail(
        "the model directory {} has no *.safetensors; for a run without weights use --load-format "
        "dummy",
        shown(directory.string(), 300));
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace

Checkpoint::Checkpoint(const std::filesystem::path& directory) {
  const std::filesystem::path index_path = directory / kIndexFile;
  const bool has_single = is_there(directory / kSingleFile);
  std::optional<WeightMap> index;
  const std::string what = shown(index_path.string(), 300);
  std::set<std::string> named;
  if (is_there(index_path)) {
    index = read_index(index_path, what);
    for (const auto& [tensor, file] : *index) {
      named.insert(file);
    }
    // A smaller model was saved over a sharded one, and the shards' index is still there. Like
    // transformers, we use the single file.
    if (has_single && !named.contains(kSingleFile)) {
      index.reset();
      notices_.push_back(fmt::format("{} is ignored, {} holds the whole model", what, kSingleFile));
    }
  }
  if (index) {
    open(directory, {named.begin(), named.end()});
    compare_with_index(*index, what);
  } else if (has_single) {
    open(directory, {kSingleFile});
  } else {
    open(directory, every_safetensors_of(directory));
  }
}

void Checkpoint::open(const std::filesystem::path& directory,
                      const std::vector<std::string>& names) {
  if (names.size() > kMaxFiles) {
    fail("{} has its weights in {} files; at most {} are read", shown(directory.string(), 300),
         names.size(), kMaxFiles);
  }
  for (const std::string& name : names) {
    files_.emplace_back(directory / name);
  }
  for (const SafetensorsFile& file : files_) {
    for (const StoredTensor& tensor : file.tensors()) {
      const auto [place, fresh] =
          tensors_.try_emplace(tensor.name, TensorPlace{.tensor = &tensor, .file = &file});
      if (!fresh) {
        fail("{}: tensor {} lies in {} too; each must be there once",
             shown(file.file().path().string(), 300), shown(tensor.name),
             shown(place->second.file->file().path().filename().string()));
      }
    }
  }
}

void Checkpoint::compare_with_index(const WeightMap& index, const std::string& what) {
  for (const auto& [tensor, file] : index) {
    const TensorPlace* place = find(tensor);
    if (place == nullptr || place->file->file().path().filename() != file) {
      fail("{}: tensor {} is said to lie in {}, which does not hold it{}", what, shown(tensor),
           shown(file),
           place == nullptr
               ? ""
               : fmt::format(" ({} does)", shown(place->file->file().path().filename().string())));
    }
  }
  for (auto& [name, place] : tensors_) {
    place.listed = index.contains(name);
  }
}

void check_listed(const TensorPlace& place, const std::string& what) {
  if (!place.listed) {
    fail("{}: tensor {} lies in {}, but the index does not name it", what,
         shown(place.tensor->name), shown(place.file->file().path().filename().string()));
  }
}

const TensorPlace* Checkpoint::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

void Checkpoint::check_unchanged() const {
  for (const SafetensorsFile& file : files_) {
    file.file().check_unchanged();
  }
}

}  // namespace poise
