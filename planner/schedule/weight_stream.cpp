#include "planner/schedule/weight_stream.h"

#include <algorithm>

#include "common/trouble.h"

namespace poise {

WeightStream::WeightStream(const WeightLayout& layout, const DeviceLimits& limits) {
  Bytes total{}, before{};
  for (const WeightPiece& piece : layout.layer.pieces) {
    total += piece.bytes;
  }
  for (const WeightPiece& piece : layout.layer.pieces) {
    pieces_.push_back({.start = static_cast<double>(before.n) / static_cast<double>(total.n),
                       .share = static_cast<double>(piece.bytes.n) / static_cast<double>(total.n)});
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
  for (std::uint32_t piece = 0; piece < pieces_.size(); ++piece) {
    const double at = pieces_[piece].start * stages;
    const auto stage = static_cast<std::uint32_t>(at);
    by_stage_[first + stage].push_back(
        {.layer = layer, .piece = piece, .place = at - stage, .next_iteration = next_iteration});
  }
}

std::vector<double> WeightStream::shares(std::uint32_t stage, std::uint32_t mini_batches,
                                         const LinkIdle& idle) const {
  double needed = 0;  // seconds
  for (const PlannedFetch& fetch : by_stage_[stage]) {
    needed += pieces_[fetch.piece].share * idle.weights.n;
  }
  double free = 0;
  for (const Seconds& behind : idle.behind) {
    free += behind.n;
  }
  const double filled = needed > 0 && free > 0 ? std::min(1.0, free / needed) : 0;
  std::vector<double> shares(mini_batches);
  double passed = 0;  // of `free`
  for (std::uint32_t i = 0; i < mini_batches; ++i) {
    shares[i] = (1 - filled) * (i + 1) / mini_batches;
    if (filled > 0) {
      passed += idle.behind[i].n;
      shares[i] += filled * passed / free;
    }
  }
  return shares;
}

std::vector<messages::WeightFetch> WeightStream::next(std::uint32_t stage,
                                                      std::uint32_t mini_batches,
                                                      bool last_iteration, const LinkIdle& idle) {
  check(idle.behind.empty() || idle.behind.size() == mini_batches,
        "the link's idle time is of these mini-batches");
  std::vector<messages::WeightFetch> fetches;
  if (stage == 0 && !first_two_fetched_) {
    for (std::size_t i = 0; i < std::min<std::size_t>(streamed_.size(), 2); ++i) {
      for (std::uint32_t piece = 0; piece < pieces_.size(); ++piece) {
        fetches.emplace_back(streamed_[i], piece, 0);
      }
    }
    first_two_fetched_ = true;
  }
  if (by_stage_[stage].empty()) {
    return fetches;
  }
  const bool is_layer = stage > 0 && stage + 1 < by_stage_.size();
  static const LinkIdle kNone;
  const std::vector<double> shares = this->shares(stage, mini_batches, is_layer ? idle : kNone);
  for (const PlannedFetch& fetch : by_stage_[stage]) {
    if (fetch.next_iteration && last_iteration) {
      first_two_fetched_ = false;
      continue;
    }
    const auto behind = std::ranges::upper_bound(shares, fetch.place) - shares.begin();
    fetches.emplace_back(fetch.layer, fetch.piece,
                         std::min(static_cast<std::uint32_t>(behind), mini_batches - 1));
  }
  return fetches;
}

}  // namespace poise
