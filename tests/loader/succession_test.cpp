// A loader that adopts what an ended one left: segments, pool, released layers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "common/trouble.h"
#include "tests/loader/loader_process.h"

namespace poise {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

class Succession : public LoaderProcess {
 protected:
  std::vector<std::byte> weights() const {
    const Segment segment = Segment::attach(this->segment("weights"), Access::read_only);
    return {segment.data(), segment.data() + segment.size().n};
  }
  // Why a successor refuses.
  std::string refusal() {
    try {
      Loader successor(adopting());
    } catch (const Failure& failure) {
      return failure.what();
    }
    return "nothing was refused";
  }
};

TEST_F(Succession, ASuccessorHasTheSameWeightsWithoutTheModelsFiles) {
  start();
  wait_for_seal();
  const std::vector<std::byte> before = weights();
  leave();
  std::filesystem::remove_all(model_);
  start(adopting());
  EXPECT_EQ(state(), LoaderState::sealed);
  EXPECT_EQ(control()->loader_epoch.load(), 2u);
  EXPECT_EQ(weights(), before);
  const auto planner = connected_planner();
  const messages::MessageT answer = ask(*planner, hello());
  ASSERT_NE(answer.body.AsLoaderReply(), nullptr);
  EXPECT_TRUE(answer.body.AsLoaderReply()->sealed);
  loader_.reset();
  for (const char* what : {"control", "weights"}) {
    EXPECT_FALSE(exists(segment(what))) << what;
  }
}

TEST_F(Succession, ThePoolStaysAndALaterOneHasANewEpoch) {
  start();
  wait_for_seal();
  {
    const auto planner = connected_planner();
    ask(*planner, hello());
    ASSERT_TRUE(ask_for_pool(*planner, claim(1 << 20, 10, 10)).granted);
    *Segment::attach(segment("blocks-1"), Access::read_write).data() = std::byte{42};
  }
  leave();
  start(adopting());
  EXPECT_EQ(*Segment::attach(segment("blocks-1"), Access::read_only).data(), std::byte{42});
  const auto planner = connected_planner();
  ask(*planner, hello());
  messages::PoolPartitionChangeT change;
  change.act_blocks = 11;
  change.kv_blocks = 9;
  messages::PoolGrantT grant = ask_for_pool(*planner, change);
  EXPECT_TRUE(grant.granted) << grant.sentence;
  EXPECT_EQ(grant.pool_epoch, 1u);
  ask_for_pool(*planner, messages::PoolReleaseT{});
  leave();
  start(adopting());
  EXPECT_FALSE(exists(segment("blocks-1")));
  const auto again = connected_planner();
  ask(*again, hello());
  grant = ask_for_pool(*again, claim(1 << 20, 10, 10));
  EXPECT_EQ(grant.pool_epoch, 2u)
      << "an executor would take the new pool for the one it has mapped";
}

TEST_F(Succession, APoolWhoseMemoryIsBeingMadeGrowsOn) {
  start();
  wait_for_seal();
  {
    const auto planner = connected_planner();
    ask(*planner, hello());
    whole_pool(*planner, claim(24 << 20, 10, 10));
  }
  leave();
  control()->pool_standing = 1 << 20;  // as if the loader had been killed then
  start(adopting());
  EXPECT_EQ(control()->pool_epoch.load(), 1u);
  step_until([&] { return control()->pool_standing.load() == 24u << 20; });
}

TEST_F(Succession, AHalfMadePoolIsRemoved) {
  start();
  wait_for_seal();
  leave();
  control()->newest_pool_epoch = 3;  // as if the loader had been killed while it made that pool
  { Segment::create(segment("blocks-3"), Bytes{4096}); }
  start(adopting());
  EXPECT_FALSE(exists(segment("blocks-3")));
}

// A loader may be killed at any instruction: its successor adopts the pool that the control segment names.
TEST_F(Succession, APoolIsThereAsLongAsItsEpochIs) {
  start();
  const auto planner = connected_planner();
  ask(*planner, hello());
  ASSERT_TRUE(ask_for_pool(*planner, claim(64 << 20, 10, 10)).granted);
  const Control seen = control();
  std::atomic<bool> over{false}, missed{false};
  std::thread looking([&] {
    while (!over) {
      const bool there = exists(segment("blocks-1"));
      missed = missed || (!there && seen->pool_epoch.load() == 1);
    }
  });
  ask_for_pool(*planner, messages::PoolReleaseT{});
  over = true;
  looking.join();
  EXPECT_FALSE(missed);
}

TEST_F(Succession, ReleasedLayersAreRestoredByTheirDigests) {
  start();
  wait_for_seal();
  const std::vector<std::byte> before = weights();
  {
    const auto planner = connected_planner();
    ask(*planner, hello());
    ASSERT_TRUE(ask(*planner, released(1)).body.AsWeightsHeld()->done);
  }
  leave();
  start(adopting());
  EXPECT_EQ(control()->released_layers.load(), 1u);
  const auto planner = connected_planner();
  ask(*planner, hello());
  EXPECT_TRUE(ask(*planner, released(1)).body.AsWeightsHeld()->done) << "asked once more";
  const messages::MessageT answer = ask(*planner, messages::WeightsRestoreT{});
  ASSERT_NE(answer.body.AsWeightsHeld(), nullptr);
  EXPECT_TRUE(answer.body.AsWeightsHeld()->done) << answer.body.AsWeightsHeld()->sentence;
  EXPECT_EQ(weights(), before);
  leave();  // and once more, with its own digests
  start(adopting());
  EXPECT_EQ(weights(), before);
}

TEST_F(Succession, ReleasedLayersOfAChangedModelStayReleased) {
  start();
  wait_for_seal();
  {
    const auto planner = connected_planner();
    ask(*planner, hello());
    ASSERT_TRUE(ask(*planner, released(1)).body.AsWeightsHeld()->done);
  }
  leave();
  std::string digests = read_file(home_ / "weights.digests");
  digests[5] ^= 1;
  write_file(home_ / "weights.digests", digests);
  start(adopting());
  const auto planner = connected_planner();
  ask(*planner, hello());
  const messages::MessageT answer = ask(*planner, messages::WeightsRestoreT{});
  ASSERT_NE(answer.body.AsWeightsHeld(), nullptr);
  EXPECT_FALSE(answer.body.AsWeightsHeld()->done);
  EXPECT_THAT(answer.body.AsWeightsHeld()->sentence, HasSubstr("no longer those that were loaded"));
  EXPECT_EQ(control()->released_layers.load(), 1u);
}

TEST_F(Succession, WeightsThatWereNotWholeAreNotAdopted) {
  EXPECT_THAT(refusal(), HasSubstr("cannot be attached"));
  start();
  wait_for_seal();
  leave();
  control()->fingerprint_ready.store(0);
  EXPECT_THAT(refusal(), HasSubstr("before its weights were whole"));
  control()->fingerprint_ready.store(1);
  control()->loader_state.store(static_cast<std::uint32_t>(LoaderState::draining));
  EXPECT_THAT(refusal(), HasSubstr("before its weights were whole"));
  control()->loader_state.store(static_cast<std::uint32_t>(LoaderState::sealed));
  ++control()->layout_hash;
  EXPECT_THAT(refusal(), HasSubstr("another build"));
  for (const char* what : {"control", "weights"}) {
    EXPECT_TRUE(exists(segment(what))) << "a refused successor removed " << what;
    unlink_segment(segment(what));
  }
}

TEST_F(Succession, ALoaderLeavesNothingBehindBeforeItsWeightsAreWhole) {
  start();
  EXPECT_FALSE(loader_->can_leave());
}

}  // namespace
}  // namespace poise
