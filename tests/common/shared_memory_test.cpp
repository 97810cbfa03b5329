#include "common/shared_memory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "common/trouble.h"

namespace poise {
namespace {

// A run id no other test uses; whatever is left under it goes at the end.
class SharedMemoryTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* what : {"control", "weights", "blocks-1"}) {
      unlink_segment(segment_name(run_, what));
    }
  }

  std::filesystem::path file(const std::string& name) const {
    return std::filesystem::path("/dev/shm") / name;
  }

  std::string run_ =
      fmt::format("5e67{:08x}{}", getpid(), ::testing::UnitTest::GetInstance()->random_seed());
};

bool reaped(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

TEST_F(SharedMemoryTest, ASegmentIsSeenByItsNameAndKeepsItsBytes) {
  const Segment made = Segment::create(segment_name(run_, "weights"), {8192});
  std::memcpy(made.data(), "poise", 5);
  const Segment seen = Segment::attach(made.name(), Access::read_only);
  EXPECT_EQ(seen.size(), Bytes{8192});
  EXPECT_EQ(std::memcmp(seen.data(), "poise", 5), 0);
}

TEST_F(SharedMemoryTest, OnlyThisUserMayOpenASegmentWhateverTheUmask) {
  const mode_t before = umask(0);
  const Segment made = Segment::create(segment_name(run_, "weights"), {4096});
  umask(before);
  struct stat status {};
  ASSERT_EQ(stat(file(made.name()).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0600u);
}

TEST_F(SharedMemoryTest, ASegmentOthersMayReadIsRefused) {
  const Segment made = Segment::create(segment_name(run_, "weights"), {4096});
  ASSERT_EQ(chmod(file(made.name()).c_str(), 0644), 0);
  EXPECT_THROW(Segment::attach(made.name(), Access::read_only), Failure);
}

TEST_F(SharedMemoryTest, ATakenNameIsRefused) {
  const Segment made = Segment::create(segment_name(run_, "weights"), {4096});
  EXPECT_THROW(Segment::create(made.name(), {4096}), Failure);
}

TEST_F(SharedMemoryTest, MoreThanTheMachineHasIsRefusedWithNumbersAndLeavesNothing) {
  try {
    Segment::create(segment_name(run_, "weights"), kGiB * (1 << 20));
    FAIL() << "a pebibyte was reserved";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("1125899906842624 bytes"), std::string::npos)
        << failure.what();
  }
  EXPECT_FALSE(std::filesystem::exists(file(segment_name(run_, "weights"))));
}

TEST_F(SharedMemoryTest, ASegmentSomebodyHoldsIsNotReaped) {
  const Segment made = Segment::create(segment_name(run_, "control"), {4096});
  EXPECT_FALSE(reaped(reap_segments(), made.name()));
  EXPECT_TRUE(std::filesystem::exists(file(made.name())));
}

TEST_F(SharedMemoryTest, WhatAKilledProcessLeftIsReaped) {
  const pid_t child = fork();
  if (child == 0) {
    const Segment control = Segment::create(segment_name(run_, "control"), {4096});
    const Segment weights = Segment::create(segment_name(run_, "weights"), {4096});
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto names = reap_segments();
  EXPECT_TRUE(reaped(names, segment_name(run_, "control")));
  EXPECT_TRUE(reaped(names, segment_name(run_, "weights")));
  EXPECT_FALSE(std::filesystem::exists(file(segment_name(run_, "weights"))));
}

TEST_F(SharedMemoryTest, OneAttachedSegmentKeepsTheWholeRun) {
  const Segment weights = Segment::create(segment_name(run_, "weights"), {4096});
  { const Segment control = Segment::create(segment_name(run_, "control"), {4096}); }
  EXPECT_FALSE(reaped(reap_segments(), segment_name(run_, "control")));
}

TEST_F(SharedMemoryTest, ControlIsBelievedOnlyWithMagicVersionAndSize) {
  const Control made = Control::create(run_, 42);
  EXPECT_EQ(Control::attach(run_)->layout_hash, 42u);
  EXPECT_EQ(Control::attach(run_).run_id(), run_);

  made->abi_version = kAbiVersion + 1;
  EXPECT_THROW(Control::attach(run_), Failure);
  made->abi_version = kAbiVersion;
  made->control_bytes += 64;
  EXPECT_THROW(Control::attach(run_), Failure);
  made->control_bytes -= 64;
  made->magic = 0;
  EXPECT_THROW(Control::attach(run_), Failure);
  made->magic = kControlMagic;
  made->run_id[0] = 'x';
  EXPECT_THROW(Control::attach(run_), Failure);
}

TEST_F(SharedMemoryTest, ASegmentCutShortIsNoControlSegment) {
  const Segment made = Segment::create(segment_name(run_, "control"), {64});
  EXPECT_THROW(Control::attach(run_), Failure);
}

TEST_F(SharedMemoryTest, MovingASegmentMovesItsMapping) {
  Segment made = Segment::create(segment_name(run_, "weights"), {4096});
  made.data()[0] = std::byte{7};
  const Segment moved = std::move(made);
  EXPECT_EQ(moved.data()[0], std::byte{7});
}

TEST(HostMemory, SomeIsAvailable) { EXPECT_GT(available_host_memory(), kMiB); }

}  // namespace
}  // namespace poise
