#include "planner/schedule/weight_stream.h"

#include <algorithm>

namespace poise {

WeightStream::WeightStream(const WeightLayout& layout, const DeviceLimits& limits) {
  Bytes total{}, before{};
  for (const WeightPiece& piece : layout.layer.pieces) {
    total += piece.bytes;
  }
  for (const WeightPiece& piece : layout.layer.pieces) {
    piece_starts_.push_back(static_cast<double>(before.n) / static_cast<double>(total.n));
    before += piece.bytes;
  }
  const auto layers = static_cast<std::uint32_t>(layout.layers);
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    if (!is_resident(limits, LayerId{layer}, layout.layers)) {
      streamed_.push_back(layer);
    }
  }
  by_stage_.resize(layers + 2);
  if (streamed_.size() <= 2) {
    return;
  }
  // Layer l is computed in stage l + 1.
  for (std::size_t i = 2; i < streamed_.size(); ++i) {
    spread(streamed_[i], streamed_[i - 1] + 1, streamed_[i], false);
  }
  spread(streamed_[0], streamed_.back() + 1, layers, true);
  spread(streamed_[1], layers + 1, layers + 1, true);
}

void WeightStream::spread(std::uint32_t layer, std::uint32_t first, std::uint32_t last,
                          bool next_iteration) {
  const std::uint32_t stages = last - first + 1;
  for (std::uint32_t piece = 0; piece < piece_starts_.size(); ++piece) {
    const double at = piece_starts_[piece] * stages;
    const auto stage = static_cast<std::uint32_t>(at);
    by_stage_[first + stage].push_back(
        {.layer = layer, .piece = piece, .place = at - stage, .next_iteration = next_iteration});
  }
}

std::vector<messages::WeightFetch> WeightStream::next(std::uint32_t stage,
                                                      std::uint32_t mini_batches,
                                                      bool last_iteration) {
  std::vector<messages::WeightFetch> fetches;
  if (stage == 0 && !first_two_fetched_) {
    for (std::size_t i = 0; i < std::min<std::size_t>(streamed_.size(), 2); ++i) {
      for (std::uint32_t piece = 0; piece < piece_starts_.size(); ++piece) {
        fetches.emplace_back(streamed_[i], piece, 0);
      }
    }
    first_two_fetched_ = true;
  }
  for (const PlannedFetch& fetch : by_stage_[stage]) {
    if (fetch.next_iteration && last_iteration) {
      first_two_fetched_ = false;
      continue;
    }
    const auto behind = static_cast<std::uint32_t>(fetch.place * mini_batches);
    fetches.emplace_back(fetch.layer, fetch.piece, std::min(behind, mini_batches - 1));
  }
  return fetches;
}

}  // namespace poise
