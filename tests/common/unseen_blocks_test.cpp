#include "common/windows/unseen_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

namespace poise {
namespace {

using messages::Kind;
using messages::Place;
using messages::Where;

TEST(UnseenBlocks, AreThoseOfWhichNoPositionIsAttended) {
  for (const std::int32_t window : {0, 1, 2, 15, 16, 17, 50}) {
    for (std::int32_t position = 0; position < 200; ++position) {
      const std::int32_t first = window == 0 ? 0 : std::max(0, position - window + 1);
      std::int32_t unseen = 0;
      while ((unseen + 1) * kBlockTokens <= first) {
        ++unseen;
      }
      EXPECT_EQ(unseen_blocks(position, window), unseen) << position << " with " << window;
    }
  }
}

TEST(LayerWindows, AreThoseOfTheShape) {
  ModelShape shape{.num_hidden_layers = 3, .sliding_window = 40};
  EXPECT_TRUE(windows_of(shape).empty());
  shape.set_window({1});
  EXPECT_EQ(windows_of(shape), (LayerWindows{0, 40, 0}));
  EXPECT_EQ(window_of(windows_of(shape)), 40);
  EXPECT_EQ(window_of({}), 0);
}

// Two sequences whose blocks have any slots. A line counts if a row of a windowed layer attends a
// position in one of its slots.
TEST(SeenLines, AreThoseWithASlotThatARowAttends) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    messages::MiniBatchT batch;
    std::vector<std::uint32_t> kv(40), act(40);
    std::iota(kv.begin(), kv.end(), 0U);
    std::iota(act.begin(), act.end(), 0U);
    std::ranges::shuffle(kv, random);
    std::ranges::shuffle(act, random);
    const auto window = static_cast<std::int32_t>(2 + random() % 60);
    std::set<std::uint32_t> seen_kv, seen_act;
    for (std::uint32_t request = 1; request <= 2; ++request) {
      const std::uint32_t context = random() % 150, rows = 1 + random() % 20;
      batch.sequences.emplace_back(request, context, rows, 0, batch.entries.size());
      for (std::uint32_t block = 0; block * kBlockTokens < context + rows; ++block) {
        const bool is_kv = random() % 2 == 0;
        auto& slots = is_kv ? kv : act;
        const std::uint32_t slot = slots.back();
        slots.pop_back();
        batch.entries.emplace_back(is_kv ? Where::LoadedKv : Where::RegeneratedKv,
                                   is_kv ? Kind::Kv : Kind::Act, Place::Host, 0, slot, slot);
        for (std::int64_t position = 0; position < context; ++position) {
          const bool attended = position > std::int64_t{context} - window;
          if (attended && position / kBlockTokens == block) {
            (is_kv ? seen_kv : seen_act).insert(slot);
          }
        }
        if (block * kBlockTokens < context) {
          batch.loads.emplace_back(is_kv ? Kind::Kv : Kind::Act, Place::Host, 16, 1, slot, slot);
          if (!is_kv) {
            batch.regenerate.emplace_back(slot, 1);
          }
        }
      }
    }
    const SeenLines seen = seen_lines(BlockTables(batch), window);
    for (std::size_t i = 0; i < batch.loads.size(); ++i) {
      const messages::BlockRun& run = batch.loads[i];
      const auto& slots = run.kind() == Kind::Kv ? seen_kv : seen_act;
      EXPECT_EQ(seen.loads[i], slots.contains(run.first_slot())) << round << ", load " << i;
    }
    for (std::size_t i = 0; i < batch.regenerate.size(); ++i) {
      EXPECT_EQ(seen.regenerate[i], seen_act.contains(batch.regenerate[i].first_slot()));
    }
    const SeenLines without = seen_lines(BlockTables(batch), 0);
    EXPECT_TRUE(std::ranges::all_of(without.loads, [](bool one) { return one; }));
  }
}

TEST(SeenLines, KeepARunOfWhichOneBlockIsSeen) {
  messages::MiniBatchT batch;
  batch.sequences.emplace_back(1, 64, 1, 0, 0);
  for (std::uint32_t block = 0; block < 5; ++block) {
    batch.entries.emplace_back(Where::LoadedKv, Kind::Kv, Place::Host, 0, block, block);
  }
  batch.loads.emplace_back(Kind::Kv, Place::Host, 16, 2, 0, 0);
  batch.loads.emplace_back(Kind::Kv, Place::Host, 16, 2, 2, 2);
  EXPECT_EQ(seen_lines(BlockTables(batch), 32).loads, (std::vector{false, true}));
  EXPECT_EQ(seen_lines(BlockTables(batch), 34).loads, (std::vector{true, true}));
}

// An ACT block that is attended as it is lies in the slot that its load fills; a KV slot of the same number is another.
TEST(SeenLines, OfAnActivationAreTheLoadsOfItsActBlock) {
  messages::MiniBatchT batch;
  batch.sequences.emplace_back(1, 48, 1, 0, 0);
  batch.entries.emplace_back(Where::LoadedKv, Kind::Kv, Place::Host, 0, 0, 0);
  batch.entries.emplace_back(Where::LoadedKv, Kind::Kv, Place::Host, 0, 1, 1);
  batch.entries.emplace_back(Where::Activation, Kind::Act, Place::Host, 0, 0, 0);
  batch.loads.emplace_back(Kind::Kv, Place::Host, 16, 2, 0, 0);
  batch.loads.emplace_back(Kind::Act, Place::Host, 16, 1, 0, 0);
  EXPECT_EQ(seen_lines(BlockTables(batch), 16).loads, (std::vector{false, true}));
}

}  // namespace
}  // namespace poise
