#include "kernels/cuda/attention_blocks.h"

#include <gtest/gtest.h>

namespace poise::cuda {
namespace {

constexpr std::int64_t kPlaces = 264;  // two blocks on each multiprocessor of an H200

// (sequence, head) pairs of OPT-6.7B. Times there: bench/results.
int blocks_for(std::int64_t sequences, std::int64_t context) {
  return blocks_for_context(32 * sequences, context, kPlaces);
}

TEST(AttentionBlocks, ManyShareALongContextThatIsAlone) {
  EXPECT_GE(blocks_for(1, 8192), 4);
  EXPECT_GE(blocks_for(1, 1040), 4);
}

TEST(AttentionBlocks, NoBlocksShareWhereEveryPlaceIsTaken) {
  EXPECT_EQ(blocks_for(8, 1024), 1);
  EXPECT_EQ(blocks_for(128, 1025), 1);
}

TEST(AttentionBlocks, TwoShareWhereASecondRoundWouldBeNearlyEmpty) {
  EXPECT_EQ(blocks_for(9, 1040), 2);
}

TEST(AttentionBlocks, AreNoMoreThanChunksAskFor) {
  for (const std::int64_t context : {1, 64, 255, 256}) {
    EXPECT_EQ(blocks_for(1, context), 1) << context;
  }
  for (const std::int64_t context : {1, 300, 3000, 30'000}) {
    for (const std::int64_t sequences : {1, 3, 50, 2000}) {
      const int blocks = blocks_for(sequences, context);
      EXPECT_GE(blocks, 1);
      EXPECT_LE(blocks, kSlices);
      EXPECT_EQ(blocks & (blocks - 1), 0) << "a cluster is a power of two";
    }
  }
}

}  // namespace
}  // namespace poise::cuda
