#include "loader/blocks_segment.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "tests/loader/loader_process.h"

namespace poise {
namespace {

// Pages of shared memory in this process's page tables.
Bytes mapped_pages() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "RssShmem:") {
      std::int64_t kib = 0;
      status >> kib;
      return kKiB * kib;
    }
  }
  ADD_FAILURE() << "the kernel does not say how much shared memory is mapped";
  return {};
}

TEST(BlocksSegment, EveryPageIsThereAndZeroButNotInTheLoadersPageTables) {
  const Bytes before = mapped_pages();
  const std::atomic<bool> stop{false};
  const std::string name = segment_name(testing_support::fresh_run_id(), "blocks-1");
  const BlocksSegment segment(name, kMiB * 96, stop);
  EXPECT_LT((mapped_pages() - before).n, kMiB.n);
  struct stat status {};
  ASSERT_EQ(stat(("/dev/shm/" + name).c_str(), &status), 0);
  EXPECT_GE(status.st_blocks * 512, (kMiB * 96).n);
  const Segment attached = Segment::attach(name, Access::read_only);
  EXPECT_TRUE(std::all_of(attached.data(), attached.data() + attached.size().n,
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

using SealedWeights = testing_support::LoaderProcess;

TEST_F(SealedWeights, AreNotInTheLoadersPageTables) {
  const Bytes before = mapped_pages();
  start();
  wait_for_seal();
  const Bytes weights{static_cast<std::int64_t>(control()->weights_bytes)};
  EXPECT_LT((mapped_pages() - before).n, weights.n / 2);  // the control segment is
}

}  // namespace
}  // namespace poise
