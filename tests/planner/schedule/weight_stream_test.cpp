#include "planner/schedule/weight_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "tests/support/small_shape.h"

namespace poise {
namespace {

WeightLayout layout_of(std::int32_t layers) {
  const ModelShape shape = testing_support::small_shape(layers);
  return weight_layout(shape, DType::float16);
}

// Two buffers. A fetch goes on with a layer that is arriving, or takes the buffer whose layer was
// computed longest ago; a layer stays where it is until its buffer is taken.
class TwoBuffers {
 public:
  explicit TwoBuffers(std::size_t pieces) : pieces_(pieces) {}

  void fetch(std::uint32_t layer, std::uint32_t piece) {
    Buffer* buffer = nullptr;
    for (Buffer& one : buffers_) {
      if (one.layer == layer && one.waiting) {
        buffer = &one;
      }
    }
    if (buffer == nullptr) {
      for (Buffer& one : buffers_) {
        if (!one.waiting && !one.computing && (buffer == nullptr || one.since < buffer->since)) {
          buffer = &one;
        }
      }
      ASSERT_NE(buffer, nullptr) << "layer " << layer << " has no buffer to go to";
      *buffer = {.layer = layer, .waiting = true, .since = buffer->since};
    }
    EXPECT_TRUE(buffer->pieces.insert(piece).second) << "a piece is fetched twice";
  }
  void begin(std::uint32_t layer) {
    const auto found =
        std::ranges::find_if(buffers_, [&](const Buffer& one) { return one.layer == layer; });
    ASSERT_NE(found, buffers_.end()) << "layer " << layer << " was not fetched";
    EXPECT_EQ(found->pieces.size(), pieces_) << "layer " << layer << " is not complete";
    found->waiting = false;
    found->computing = true;
  }
  void end() {
    for (Buffer& one : buffers_) {
      if (one.computing) {
        one.computing = false;
        one.since = ++uses_;
      }
    }
  }
  bool anything_waits() const {
    return std::ranges::any_of(buffers_, [](const Buffer& one) { return one.waiting; });
  }

 private:
  struct Buffer {
    std::optional<std::uint32_t> layer;
    std::set<std::uint32_t> pieces;
    bool waiting = false, computing = false;
    int since = 0;
  };
  std::array<Buffer, 2> buffers_;
  std::size_t pieces_;
  int uses_ = 0;
};

TEST(WeightStream, EachStreamedLayerIsWholeInOneOfTwoBuffersWhenItIsComputed) {
  for (std::int32_t layers = 1; layers <= 9; ++layers) {
    const WeightLayout layout = layout_of(layers);
    for (std::int32_t resident = 0; resident <= layers; ++resident) {
      SCOPED_TRACE(testing::Message() << resident << " of " << layers << " layers resident");
      const DeviceLimits limits{.resident_layers = resident};
      WeightStream stream(layout, limits);
      TwoBuffers buffers(layout.layer.pieces.size());
      for (int iteration = 0; iteration < 8; ++iteration) {
        const std::uint32_t mini_batches = 1 + static_cast<std::uint32_t>(iteration % 4) * 2;
        LinkIdle idle{.behind = std::vector<Seconds>(mini_batches), .weights = {2}};
        idle.behind[mini_batches / 2].n = 1;
        for (std::int32_t stage = 0; stage < layers + 2; ++stage) {
          const LayerId layer{static_cast<std::uint32_t>(stage - 1)};
          const bool streamed =
              stage >= 1 && stage <= layers && !is_resident(limits, layer, layers);
          if (streamed) {
            buffers.begin(layer.n);
          }
          for (const auto& fetch :
               stream.next(static_cast<std::uint32_t>(stage), mini_batches, iteration == 7,
                           iteration % 2 == 0 ? LinkIdle() : idle)) {
            EXPECT_FALSE(is_resident(limits, LayerId{fetch.layer()}, layers));
            EXPECT_LT(fetch.after_mini_batch(), mini_batches);
            buffers.fetch(fetch.layer(), fetch.piece());
          }
          if (streamed) {
            buffers.end();
          }
        }
      }
      EXPECT_FALSE(buffers.anything_waits()) << "something is fetched that no layer uses";
    }
  }
}

TEST(WeightStream, TwoStreamedLayersAreFetchedOnce) {
  WeightStream stream(layout_of(4), {.resident_layers = 2});
  std::size_t fetches = 0;
  for (int iteration = 0; iteration < 3; ++iteration) {
    for (std::uint32_t stage = 0; stage < 6; ++stage) {
      fetches += stream.next(stage, 2, false).size();
    }
  }
  EXPECT_EQ(fetches, 2 * layout_of(4).layer.pieces.size());
}

TEST(WeightStream, PiecesAreSpreadBetweenTheMiniBatches) {
  WeightStream stream(layout_of(4), {.resident_layers = 0});
  stream.next(0, 8, false);
  stream.next(1, 8, false);
  const auto fetches = stream.next(2, 8, false);
  std::set<std::uint32_t> places;
  for (const auto& fetch : fetches) {
    EXPECT_EQ(fetch.layer(), 2u);
    places.insert(fetch.after_mini_batch());
  }
  EXPECT_EQ(fetches.front().after_mini_batch(), 0u);
  EXPECT_EQ(places.size(), fetches.size());
}

constexpr double kPieceShare = 0.05;  // of a layer, at most

// The share of a layer's bytes that is fetched behind each of four mini-batches.
std::vector<double> shares_with(const LinkIdle& idle) {
  const WeightLayout layout =
      weight_layout(testing_support::small_shape(4), DType::float16, {1 << 10});
  WeightStream stream(layout, {.resident_layers = 0});
  stream.next(0, 4, false);
  stream.next(1, 4, false);
  std::vector<double> shares(4);
  for (const auto& fetch : stream.next(2, 4, false, idle)) {
    shares[fetch.after_mini_batch()] +=
        static_cast<double>(layout.layer.pieces[fetch.piece()].bytes.n) /
        static_cast<double>(layout.layer.bytes.n);
  }
  return shares;
}

TEST(WeightStream, FillsTheTimeInWhichTheLinkWouldBeIdle) {
  const auto shares = shares_with({.behind = {{0}, {6}, {0}, {2}}, .weights = {4}});
  EXPECT_EQ(shares[0], 0);
  EXPECT_NEAR(shares[1], 0.75, kPieceShare);
  EXPECT_EQ(shares[2], 0);
  EXPECT_NEAR(shares[3], 0.25, kPieceShare);
}

TEST(WeightStream, SpreadsEvenlyWhatTheIdleTimeDoesNotHold) {
  const auto shares = shares_with({.behind = {{0}, {0}, {2}, {0}}, .weights = {4}});
  for (const std::size_t other : {0, 1, 3}) {
    EXPECT_NEAR(shares[other], 0.125, kPieceShare);
  }
  EXPECT_NEAR(shares[2], 0.625, kPieceShare);
}

}  // namespace
}  // namespace poise
