#include "common/files/replace_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "common/trouble.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::read_file;
using testing_support::TempDirectory;
using testing_support::write_file;

class ReplaceFile : public testing::Test {
 protected:
  std::filesystem::path path() const { return folder_.path() / "state.json"; }

  // What was said; empty where the file was replaced.
  static std::string refusal(const std::filesystem::path& path, const std::string& content) {
    try {
      replace_file(path, content);
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.code(), Exit::busy);
      return failure.what();
    }
    return "";
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  TempDirectory folder_;
};

TEST_F(ReplaceFile, TheFileHoldsTheNewContentAlone) {
  for (const Replacement how :
       {Replacement{}, Replacement{.durable = false}, Replacement{.shared = true}}) {
    write_file(path(), "something longer than what follows");
    replace_file(path(), "new", how);
    EXPECT_EQ(read_file(path()), "new");
    EXPECT_THAT(names(), testing::ElementsAre("state.json"));
    struct stat status {};
    ASSERT_EQ(stat(path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u) << "it is this user's alone";
    std::filesystem::remove(path());
  }
}

TEST_F(ReplaceFile, AFileWithoutAFolderInItsNameIsInTheWorkingDirectory) {
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder_.path());
  EXPECT_EQ(refusal("state.json", "here"), "");
  std::filesystem::current_path(before);
  EXPECT_EQ(read_file(path()), "here");
}

TEST_F(ReplaceFile, AFolderThatIsAFileIsNamedWithTheRemedy) {
  write_file(path(), "a file");
  EXPECT_THAT(
      refusal(path() / "inside", "new"),
      AllOf(HasSubstr("state.json/inside"),
            HasSubstr("cannot be written: Not a directory (remove what stands in its place)")));
  EXPECT_EQ(read_file(path()), "a file");
}

TEST_F(ReplaceFile, AFolderThatIsNotThereIsNamedWithTheRemedy) {
  EXPECT_THAT(refusal(folder_.path() / "none" / "state.json", "new"),
              AllOf(HasSubstr("none/state.json"), HasSubstr("(make its folder)")));
}

TEST_F(ReplaceFile, AFolderInItsPlaceStaysAndNothingIsLeftBesideIt) {
  std::filesystem::create_directories(path() / "inside");
  EXPECT_THAT(refusal(path(), "new"), HasSubstr("state.json cannot be written: Is a directory"));
  EXPECT_TRUE(std::filesystem::exists(path() / "inside"));
  EXPECT_THAT(names(), testing::ElementsAre("state.json"));
}

TEST_F(ReplaceFile, ALinkInTheTemporaryFilesPlaceIsNotFollowed) {
  write_file(folder_.path() / "other", "untouched");
  std::filesystem::create_symlink(folder_.path() / "other", path().string() + ".new");
  EXPECT_THAT(refusal(path(), "new"), HasSubstr("state.json.new cannot be written"));
  EXPECT_EQ(read_file(folder_.path() / "other"), "untouched");
}

// As a full disk does: part of the content is written, then no more.
TEST_F(ReplaceFile, ADiskThatTakesOnlyAPartLeavesTheOldFile) {
  write_file(path(), "old");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 1000, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string said = refusal(path(), std::string(5000, 'x'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(said, AllOf(HasSubstr("state.json"), HasSubstr("cannot be written: File too large"),
                          HasSubstr("ulimit -f")));
  EXPECT_EQ(read_file(path()), "old");
  EXPECT_THAT(names(), testing::ElementsAre("state.json"));
}

TEST_F(ReplaceFile, AReaderSeesOneContentOrTheOther) {
  const std::string one(40'000, '1'), two(20'000, '2');
  replace_file(path(), one, {.durable = false});
  std::thread writer([&] {
    for (int i = 0; i < 200; ++i) {
      replace_file(path(), i % 2 == 0 ? two : one, {.durable = false});
    }
  });
  for (int i = 0; i < 200; ++i) {
    const std::string read = read_file(path());
    EXPECT_TRUE(read == one || read == two) << read.size() << " bytes";
  }
  writer.join();
}

}  // namespace
}  // namespace poise
