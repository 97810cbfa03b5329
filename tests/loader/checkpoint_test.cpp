#include "loader/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "common/files/json.h"
#include "common/trouble.h"
#include "tests/support/complaint.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using namespace testing_support;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CheckpointFiles : public ::testing::Test {
 protected:
  const std::filesystem::path& directory() { return directory_.path(); }

  // A file that holds one number under each name.
  void write(const std::string& file, const std::vector<std::string>& tensors) {
    std::vector<FileTensor> contents;
    for (const std::string& name : tensors) {
      contents.push_back(file_tensor(name, DType::float32, {1}, {0.5F}));
    }
    write_file(directory() / file, safetensors_bytes(contents));
  }
  void write_index(const nlohmann::json& weight_map) {
    write_index_text(nlohmann::json{{"weight_map", weight_map}}.dump());
  }
  void write_index_text(const std::string& text) {
    write_file(directory() / "model.safetensors.index.json", text);
  }
  std::string refusal() {
    return complaint([&] { Checkpoint{directory()}; });
  }
  std::string file_of(const Checkpoint& checkpoint, const std::string& tensor) {
    const TensorPlace* place = checkpoint.find(tensor);
    return place == nullptr ? "nowhere" : place->file->file().path().filename().string();
  }

 private:
  TempDirectory directory_;
};

TEST_F(CheckpointFiles, OneFileIsTheWholeModel) {
  write("model.safetensors", {"a", "b"});
  write("other.safetensors", {"c"});
  const Checkpoint checkpoint(directory());
  EXPECT_EQ(checkpoint.tensors().size(), 2u);
  EXPECT_EQ(file_of(checkpoint, "c"), "nowhere");
  EXPECT_THAT(checkpoint.notices(), IsEmpty());
}

TEST_F(CheckpointFiles, AnIndexNamesTheShards) {
  write("x-1.safetensors", {"a"});
  write("x-2.safetensors", {"b", "c"});
  write("unrelated.safetensors", {"d"});
  write_index({{"a", "x-1.safetensors"}, {"b", "x-2.safetensors"}, {"c", "x-2.safetensors"}});
  const Checkpoint checkpoint(directory());
  EXPECT_EQ(file_of(checkpoint, "a"), "x-1.safetensors");
  EXPECT_EQ(file_of(checkpoint, "c"), "x-2.safetensors");
  EXPECT_EQ(file_of(checkpoint, "d"), "nowhere");
}

TEST_F(CheckpointFiles, WithoutAnIndexEverySafetensorsFileIsRead) {
  write("part-a.safetensors", {"a"});
  write("part-b.safetensors", {"b"});
  const Checkpoint checkpoint(directory());
  EXPECT_EQ(file_of(checkpoint, "a"), "part-a.safetensors");
  EXPECT_EQ(file_of(checkpoint, "b"), "part-b.safetensors");
}

TEST_F(CheckpointFiles, AnIndexLeftBehindByALargerModelIsPassedOver) {
  write("model.safetensors", {"a"});
  write_index({{"a", "model-00001-of-00002.safetensors"}});
  const Checkpoint checkpoint(directory());
  EXPECT_EQ(file_of(checkpoint, "a"), "model.safetensors");
  EXPECT_THAT(checkpoint.notices(), ElementsAre(HasSubstr("is ignored")));
}

TEST_F(CheckpointFiles, TheCacheOfTheHubWithItsLinksIsRead) {
  std::filesystem::create_directories(directory() / "blobs");
  std::filesystem::create_directories(directory() / "snapshots/abc");
  write("blobs/0123", {"a"});
  const auto snapshot = directory() / "snapshots/abc";
  std::filesystem::create_symlink("../../blobs/0123", snapshot / "model.safetensors");
  EXPECT_NE(Checkpoint(snapshot).find("a"), nullptr);
}

TEST_F(CheckpointFiles, LinksThatLeadNowhereAreRefused) {
  const auto file = directory() / "model.safetensors";
  std::filesystem::create_symlink("../blobs/gone", file);
  EXPECT_THAT(refusal(), HasSubstr("symbolic link to a file that is not there"));
  std::filesystem::remove(file);
  std::filesystem::create_symlink("model.safetensors", file);
  EXPECT_THAT(refusal(), HasSubstr("leads back to itself"));
  std::filesystem::remove(file);
  std::filesystem::create_symlink("/dev/zero", file);
  EXPECT_THAT(refusal(), HasSubstr("is a device"));
}

TEST_F(CheckpointFiles, TheSameTensorInTwoFilesIsRefused) {
  write("a.safetensors", {"x", "y"});
  write("b.safetensors", {"z", "y"});
  EXPECT_THAT(refusal(), HasSubstr("b.safetensors: tensor y lies in a.safetensors too"));
  write_index({{"x", "a.safetensors"}, {"y", "a.safetensors"}, {"z", "b.safetensors"}});
  EXPECT_THAT(refusal(), HasSubstr("tensor y lies in a.safetensors too"));
}

TEST_F(CheckpointFiles, ADirectoryWithoutWeightsIsRefusedWithAWayOn) {
  EXPECT_THAT(refusal(), HasSubstr("has no *.safetensors; for a run without weights use"));
  write_file(directory() / "pytorch_model.bin", "x");
  EXPECT_THAT(refusal(), HasSubstr("only pytorch_model.bin: pickles are not read"));
}

TEST_F(CheckpointFiles, AnIndexThatIsWrongIsRefusedInOneSentence) {
  write("a.safetensors", {"x"});
  write("b.safetensors", {"y"});
  struct Row {
    std::string index;
    std::string says;
  };
  const auto naming = [](const std::string& file) {
    return R"({"weight_map":{"x":")" + file + R"("}})";
  };
  const std::vector<Row> table{
      {"", "not valid JSON"},
      {"[]", "a JSON object is needed"},
      {"{}", "\"weight_map\" is missing or empty"},
      {R"({"weight_map":{}})", "\"weight_map\" is missing or empty"},
      {R"({"weight_map":null})", "\"weight_map\" is missing or empty"},
      {R"({"weight_map":[]})", "\"weight_map\" must be an object, not a list"},
      {R"({"weight_map":{"x":1}})", "the file of tensor x must be a string, not 1"},
      {R"({"weight_map":{"x":"a.safetensors","x":"b.safetensors"}})", "\"x\" appears twice"},
      {naming("../a.safetensors"), "only names of files beside the index are allowed"},
      {naming("/etc/a.safetensors"), "only names of files beside the index are allowed"},
      {naming("sub/a.safetensors"), "only names of files beside the index are allowed"},
      {naming("./a.safetensors"), "only names of files beside the index are allowed"},
      {naming("..\\\\a.safetensors"), "only names of files beside the index are allowed"},
      {naming("a.safetensors\\u0000"), "only names of files beside the index are allowed"},
      {naming(std::string(300, 'a') + ".safetensors"), "only names of files beside the index"},
      {naming(".."), "only names of files beside the index are allowed"},
      {naming(""), "which is no *.safetensors"},
      {naming(".safetensors"), "only names of files beside the index are allowed"},
      {naming("config.json"), "which is no *.safetensors"},
      {naming("c.safetensors"), "c.safetensors is not there"},
      {naming("b.safetensors"), "is said to lie in b.safetensors, which does not hold it"},
      {R"({"weight_map":{"x":"b.safetensors","y":"a.safetensors"}})",
       "tensor x is said to lie in b.safetensors, which does not hold it (a.safetensors does)"},
      {R"({"weight_map":{"x":"a.safetensors","w":"a.safetensors"}})",
       "tensor w is said to lie in a.safetensors, which does not hold it"},
  };
  for (const Row& row : table) {
    write_index_text(row.index);
    const std::string sentence = refusal();
    EXPECT_THAT(sentence, HasSubstr(row.says)) << row.index;
    EXPECT_EQ(sentence.find('\n'), std::string::npos) << sentence;
  }
}

TEST_F(CheckpointFiles, ATensorTheIndexDoesNotNameIsMarkedSo) {
  write("a.safetensors", {"x", "y"});
  write_index({{"x", "a.safetensors"}});
  const Checkpoint checkpoint(directory());
  EXPECT_TRUE(checkpoint.find("x")->listed);
  EXPECT_FALSE(checkpoint.find("y")->listed);
}

}  // namespace
}  // namespace poise
