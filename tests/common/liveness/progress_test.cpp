#include "common/liveness/progress.h"

#include <gtest/gtest.h>
#include <unistd.h>

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

}  // namespace
}  // namespace poise
