#include "kernels/cuda/attention_blocks.h"

#include <gtest/gtest.h>

#include <vector>

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

TEST(AttentionBlocks, ARowSeesTheLastPositionsOfItsWindow) {
  EXPECT_EQ(first_seen(100, 0), 0);
  EXPECT_EQ(first_seen(100, 1), 100);
  EXPECT_EQ(first_seen(100, 100), 1);
  EXPECT_EQ(first_seen(100, 101), 0);
  EXPECT_EQ(first_seen(100, 1000), 0);
}

TEST(AttentionBlocks, SlicesArePartsOfWhichChunksAreSeen) {
  for (int first = 0; first < 6000; first += 85) {
    for (int last = first; last < 6000; last += 127) {
      unsigned want = 0;
      for (int chunk = first / kChunkPositions; chunk <= last / kChunkPositions; ++chunk) {
        want |= 1u << chunk % kSlices;
      }
      EXPECT_EQ(slices_of(first, last), want) << first << " to " << last;
    }
  }
}

// As AttentionPlace hands out slices: block r of a cluster begins with that of the r-th chunk.
TEST(AttentionBlocks, OfAClusterTakeEveryTileOnceSliceBySlice) {
  for (int first = 0; first < 40; ++first) {
    for (int tiles = first + 1; tiles < 90; ++tiles) {
      for (int cluster = 1; cluster <= kSlices; cluster *= 2) {
        std::vector<int> taken(static_cast<std::size_t>(tiles));
        const int chunk = first / kChunkTiles;
        for (int rank = 0; rank < cluster; ++rank) {
          TileWalk walk((chunk + rank) & (cluster - 1), cluster, first, tiles);
          EXPECT_EQ(!walk.done(), (chunk + rank) * kChunkTiles < tiles) << "a block has work";
          for (int slice = -1, tile = -1; !walk.done(); walk.step()) {
            ASSERT_GE(walk.slice(), slice);
            ASSERT_TRUE(walk.slice() > slice || walk.tile() > tile);
            slice = walk.slice();
            tile = walk.tile();
            ASSERT_EQ(tile / kChunkTiles % kSlices, slice);
            ASSERT_EQ((slice - chunk) & (cluster - 1), rank);
            ++taken[static_cast<std::size_t>(tile)];
          }
        }
        for (int tile = 0; tile < tiles; ++tile) {
          ASSERT_EQ(taken[static_cast<std::size_t>(tile)], tile >= first ? 1 : 0)
              << tile << " of " << first << " to " << tiles << " by " << cluster;
        }
      }
    }
  }
}

}  // namespace
}  // namespace poise::cuda
