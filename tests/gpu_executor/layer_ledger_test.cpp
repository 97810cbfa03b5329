#include "gpu_executor/layer_ledger.h"

#include <gtest/gtest.h>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr DeviceLimits kOneResident{.resident_layers = 1};

void fetch_all(LayerLedger& buffers, std::uint32_t layer) {
  for (std::uint32_t piece = 0; piece < 4; ++piece) {
    buffers.fetch({layer}, piece);
  }
}

int run(LayerLedger& buffers, std::uint32_t layer) {
  const int buffer = buffers.use({layer});
  buffers.check_complete(buffer);
  buffers.used(buffer);
  return buffer;
}

TEST(LayerLedger, LayersPassThroughTheTwoInTurn) {
  LayerLedger buffers(kOneResident, 5, 4);
  int last = -1;
  for (const std::uint32_t layer : {1u, 2u, 3u, 4u, 1u, 2u}) {
    fetch_all(buffers, layer);
    const int buffer = run(buffers, layer);
    EXPECT_NE(buffer, last);
    last = buffer;
  }
}

TEST(LayerLedger, TheNextLayerArrivesWhileOneIsComputed) {
  LayerLedger buffers(kOneResident, 5, 4);
  fetch_all(buffers, 1);
  const int first = buffers.use({1});
  fetch_all(buffers, 2);
  EXPECT_THROW(buffers.fetch({3}, 0), Failure);
  buffers.used(first);
  EXPECT_EQ(buffers.fetch({3}, 0), first);
}

TEST(LayerLedger, AnOrderMayBringTheRestOfItsOwnLayer) {
  LayerLedger buffers(kOneResident, 5, 4);
  const int early = buffers.fetch({1}, 0);
  const int used = buffers.use({1});
  EXPECT_EQ(used, early);
  EXPECT_THROW(buffers.check_complete(used), Failure);
  for (const std::uint32_t piece : {1u, 2u, 3u}) {
    EXPECT_EQ(buffers.fetch({1}, piece), used);
  }
  buffers.check_complete(used);
  EXPECT_NE(buffers.fetch({1}, 0), used) << "for the next time it is computed";
}

TEST(LayerLedger, ALayerThatIsStillThereNeedsNoFetch) {
  LayerLedger buffers(kOneResident, 3, 4);
  fetch_all(buffers, 1);
  run(buffers, 1);
  fetch_all(buffers, 2);
  run(buffers, 2);
  run(buffers, 1);
  run(buffers, 2);
}

TEST(LayerLedger, AnAbandonedLayerIsFetchedAnew) {
  LayerLedger buffers(kOneResident, 5, 4);
  fetch_all(buffers, 1);
  buffers.fetch({2}, 0);
  buffers.abandon();
  fetch_all(buffers, 1);
  fetch_all(buffers, 2);
  run(buffers, 1);
  run(buffers, 2);
}

TEST(LayerLedger, ALayerThatWasNotFetchedIsNotComputed) {
  LayerLedger buffers(kOneResident, 5, 4);
  const int buffer = buffers.use({3});
  EXPECT_THROW(buffers.check_complete(buffer), Failure);
}

}  // namespace
}  // namespace poise
