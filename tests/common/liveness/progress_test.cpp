#include "common/liveness/progress.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace poise {
namespace {

TEST(Progress, IsTakenOnce) {
  take_progress();
  EXPECT_FALSE(take_progress());
  note_progress();
  note_progress();
  EXPECT_TRUE(take_progress());
  EXPECT_FALSE(take_progress());
}

TEST(Progress, WhatIsNotedWithinALongStepIsPublished) {
  ProgressWord word{};
  {
    const ProgressPublisher publisher(word);
    for (int i = 0; i < 10'000 && word.steps.load() < 3; ++i) {
      note_progress();
      usleep(1000);
    }
    EXPECT_GE(word.steps.load(), 3u);
    const DiskWait waiting;  // a call that notes nothing
    const std::uint64_t before = word.steps.load();
    for (int i = 0; i < 10'000 && word.steps.load() < before + 3; ++i) {
      usleep(1000);
    }
    EXPECT_GE(word.steps.load(), before + 3);
  }
  const std::uint64_t before = word.steps.load();
  take_progress();
  const ProgressPublisher publisher(word);
  usleep(500'000);
  EXPECT_EQ(word.steps.load(), before) << "a process that notes nothing moves";
}

// Such waits are always under way somewhere: each look of the publisher would see one.
TEST(Progress, ShortWaitsForADiskAreNoMovement) {
  using Clock = std::chrono::steady_clock;
  take_progress();
  ProgressWord word{};
  Clock::duration longest{};
  {
    const ProgressPublisher publisher(word);
    for (const auto begin = Clock::now(); Clock::now() - begin < std::chrono::seconds(1);) {
      const auto before = Clock::now();
      {
        const DiskWait waiting;
        usleep(1000);
      }
      longest = std::max(longest, Clock::now() - before);
    }
  }
  const bool were_short = longest < std::chrono::milliseconds(300);  // on a machine that gave this thread a core
  EXPECT_TRUE(word.steps.load() == 0 || !were_short) << word.steps.load();
}

}  // namespace
}  // namespace poise
