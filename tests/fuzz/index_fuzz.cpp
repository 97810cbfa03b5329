// model.safetensors.index.json beside two shards, and the same index beside a model.safetensors. An accepted index names
// files of its directory alone, and each tensor lies in the file that it names.

#include "common/files/json.h"
#include "loader/checkpoint.h"
#include "tests/fuzz/fuzzing.h"

namespace poise::fuzzing {
namespace {

constexpr const char* kIndex = "model.safetensors.index.json";

std::string file_of(std::initializer_list<const char*> tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::uint64_t end = 0;
  for (const char* tensor : tensors) {
    header[tensor] = {{"dtype", "U8"}, {"shape", {1}}, {"data_offsets", {end, end + 1}}};
    ++end;
  }
  const std::string text = header.dump();
  const std::uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text +
         std::string(end, '\0');
}

// Two directories with one index.
struct Models {
  Folder sharded, single;

  Models() {
    sharded.write("a.safetensors", file_of({"w", "x"}));
    sharded.write("b.safetensors", file_of({"y"}));
    single.write("model.safetensors", file_of({"w", "x", "y"}));
    sharded.write(kIndex, "");
    std::filesystem::create_hard_link(sharded / kIndex, single / kIndex);
  }
};

void look(const Folder& folder, std::string_view index) {
  refusal([&] {
    const Checkpoint model(folder.path());
    for (const std::string& notice : model.notices()) {
      expect_sentence(notice);
    }
    const auto read = nlohmann::json::parse(index);
    bool any = false;
    for (const auto& [name, place] : model.tensors()) {
      expect(place.file->file().path().parent_path() == folder.path(),
             "files are beside the index");
      any = any || place.listed;
      if (model.notices().empty() && place.listed) {
        expect(read.at("weight_map").at(name) == place.file->file().path().filename().string(),
               "a tensor lies in the file that the index names");
      }
    }
    expect(any, "an index that is followed names a tensor that is there");
  });
}

void run_index(Input input) {
  const std::uint8_t* data = input.data();
  const std::size_t size = input.size();
  static const Models models;
  const std::string_view index = text_of({data, size});
  models.sharded.write(kIndex, index);
  look(models.sharded, index);
  look(models.single, index);
}

}  // namespace

const Target kIndexTarget{"index", run_index};

}  // namespace poise::fuzzing
