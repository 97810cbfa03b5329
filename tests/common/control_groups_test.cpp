#include "common/control_groups.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

namespace poise {
namespace {

namespace fs = std::filesystem;

// The files of control groups, as the kernel would show them.
class ControlGroupsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "poise-groups-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const fs::path& name, const std::string& text) {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  std::optional<Bytes> headroom() const {
    return control_group_headroom(root_ / "groups", root_ / "membership");
  }

  fs::path root_;
};

TEST_F(ControlGroupsTest, WithoutALimitThereIsNoHeadroomToName) {
  EXPECT_EQ(headroom(), std::nullopt);
  write("membership", "0::/batch\n");
  write("groups/batch/memory.max", "max\n");
  write("groups/batch/memory.current", "1000\n");
  EXPECT_EQ(headroom(), std::nullopt);
}

TEST_F(ControlGroupsTest, PageCacheOfFilesIsFreeAndSharedMemoryIsNot) {
  write("membership", "0::/batch\n");
  write("groups/batch/memory.max", "10000\n");
  write("groups/batch/memory.current", "9000\n");
  EXPECT_EQ(headroom(), Bytes{1000});
  write("groups/batch/memory.stat",
        "anon 1500\nfile 7000\nkernel 500\nshmem 3000\nfile_mapped 9\n");
  EXPECT_EQ(headroom(), Bytes{5000});
}

TEST_F(ControlGroupsTest, TheTightestGroupOnTheWayUpCounts) {
  write("membership", "0::/a/b\n");
  write("groups/a/b/memory.max", "1000\n");
  write("groups/a/b/memory.current", "100\n");
  write("groups/a/memory.max", "1200\n");
  write("groups/a/memory.current", "700\n");
  EXPECT_EQ(headroom(), Bytes{500});
  write("groups/a/memory.current", "1300\n");  // above its limit, being reclaimed
  EXPECT_EQ(headroom(), Bytes{0});
}

TEST_F(ControlGroupsTest, VersionOneSaysTheSameInOtherWords) {
  write("membership", "9:name=systemd:/\n5:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n");
  // Within a container only the root of what it sees is there.
  write("groups/memory/memory.limit_in_bytes", "10000\n");
  write("groups/memory/memory.usage_in_bytes", "9000\n");
  write("groups/memory/memory.stat",
        "cache 1\nshmem 1\ntotal_cache 7000\ntotal_rss 2000\ntotal_shmem 3000\n");
  EXPECT_EQ(headroom(), Bytes{5000});
}

TEST_F(ControlGroupsTest, FiguresThatDoNotAgreeNeverGiveMoreThanTheLimit) {
  write("membership", "0::/\n");
  write("groups/memory.max", "10000\n");
  write("groups/memory.current", "2000\n");
  write("groups/memory.stat", "file 5000\nshmem 0\n");  // read a moment later
  EXPECT_EQ(headroom(), Bytes{10000});
}

}  // namespace
}  // namespace poise
