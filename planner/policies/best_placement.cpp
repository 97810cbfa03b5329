#include "planner/policies/best_placement.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include "common/trouble.h"
#include "planner/policies/allocation.h"

namespace poise {
namespace {

constexpr std::int64_t kMaxOfAKind = std::int64_t{1} << 24;  // on the device; also in sizes.h
constexpr std::int64_t kGrid = 32;                           // steps of one search
constexpr int kMaxRehearsals = 200;
// A placement may be best in rehearsal though its estimate is this factor longer than the best one.
constexpr double kWorthRehearsal = 1.25;
constexpr double kSlack = 0.98;       // bounds count parts of blocks, packing whole ones
constexpr double kWorthwhile = 1e-4;  // of the time; less is rounding

std::uint32_t to_count(std::int64_t n) { return static_cast<std::uint32_t>(n); }

double score(const Profile& profile, const AllocationInputs& inputs, const Allocation& blocks) {
  return work_time(profile, inputs, blocks, least_times(profile, inputs, blocks));
}

// What a layer's blocks take of the memories.
struct Room {
  std::int64_t host;    // bytes of a layer's region
  std::int64_t device;  // bytes for a layer's blocks
};

class Placing {
 public:
  Placing(const Profile& profile, const AllocationInputs& inputs, std::int64_t act, std::int64_t kv)
      : profile_(profile),
        inputs_(inputs),
        fixed_(inputs.fixed.for_blocks(act, kv)),
        act_(act),
        kv_(kv),
        act_size_(inputs.sizes.block(BlockKind::act).n),
        kv_size_(inputs.sizes.block(BlockKind::kv).n),
        most_kv_here_(inputs.fixed.gpu_act_alone ? 0 : kMaxOfAKind) {
    // Blocks that stand on the device are there whatever is wished, beside one on the host.
    if (fixed_.fixes_blocks()) {
      act_ = std::max<std::int64_t>(act, *fixed_.gpu_act_blocks);
      kv_ = std::max<std::int64_t>(kv, *fixed_.gpu_kv_blocks);
      if (act_ + kv_ == std::int64_t{*fixed_.gpu_act_blocks} + *fixed_.gpu_kv_blocks) {
        ++(act > 0 ? act_ : kv_);
      }
    }
  }

  // `layers`: those alone that stay on the device; below 0: any number.
  std::optional<Allocation> run(std::int32_t only = -1) {
    const auto region = [&](std::int32_t layers) {
      const Bytes host = inputs_.host + inputs_.layer_copy * layers;
      return std::max<std::int64_t>(host.n, 0) / inputs_.layers / kRegionAlignment *
             kRegionAlignment;
    };
    if (act_ + kv_ == 0) {
      return std::nullopt;
    }
    if (inputs_.fixed.resident_layers) {
      if (only >= 0 && only != *inputs_.fixed.resident_layers) {
        return std::nullopt;
      }
      only = *inputs_.fixed.resident_layers;
    }
    if (!inputs_.device) {
      try_on_device(0, 0, {.host = region(0), .device = 0}, std::nullopt);
      return best_;
    }
    const DeviceRoom& device = *inputs_.device;
    const Bytes left = device.left(act_, kv_, 0);
    for (std::int32_t layers = std::max(only, 0); layers <= (only < 0 ? inputs_.layers : only);
         ++layers) {
      const Bytes free =
          left - device.layer * layers + (layers == inputs_.layers ? device.streaming : Bytes{});
      if (left.n >= 0 && free.n >= 0) {
        try_layers(layers, {.host = region(layers), .device = free.n / inputs_.layers});
      }
    }
    return best_;
  }

 private:
  // More on the device is never worse. So one kind comes first, as many as there is room for or a few
  // less, where the other kind then fills the room better, and the other takes what is left.
  void try_layers(std::int32_t layers, const Room& room) {
    if (fixed_.fixes_blocks()) {
      const std::int64_t act = *fixed_.gpu_act_blocks, kv = *fixed_.gpu_kv_blocks;
      if (act * act_size_ + kv * kv_size_ <= room.device) {
        try_on_device(act, kv, room, layers);
      }
      return;
    }
    const std::int64_t unit = std::gcd(act_size_, kv_size_);
    for (std::int64_t fewer = 0; fewer < std::max(act_size_, kv_size_) / unit; ++fewer) {
      const std::int64_t act = std::min({act_, room.device / act_size_, kMaxOfAKind}) - fewer;
      if (act >= 0) {
        const std::int64_t rest = room.device - act * act_size_;
        try_on_device(act, std::min({kv_, rest / kv_size_, most_kv_here_}), room, layers);
      }
      const std::int64_t kv = std::min({kv_, room.device / kv_size_, most_kv_here_}) - fewer;
      if (kv >= 0) {
        const std::int64_t rest = room.device - kv * kv_size_;
        try_on_device(std::min({act_, rest / act_size_, kMaxOfAKind}), kv, room, layers);
      }
    }
  }

  void try_on_device(std::int64_t act, std::int64_t kv, const Room& room,
                     std::optional<std::int32_t> layers) {
    if (act + kv == act_ + kv_ && act + kv > 0) {  // the host's pool has a block
      --(act > 0 ? act : kv);
    }
    if ((act_ - act) * act_size_ + (kv_ - kv) * kv_size_ > room.host) {
      return;
    }
    const Allocation blocks{.act_blocks = to_count(act_ - act),
                            .kv_blocks = to_count(kv_ - kv),
                            .gpu_act_blocks = to_count(act),
                            .gpu_kv_blocks = to_count(kv),
                            .placed = layers.has_value(),
                            .resident_layers = layers};
    const double time = score(profile_, inputs_, blocks);
    if (!best_ || time < best_score_) {
      best_ = blocks;
      best_score_ = time;
    }
  }

  const Profile& profile_;
  const AllocationInputs& inputs_;
  const FixedPlacement fixed_;
  std::int64_t act_, kv_;
  const std::int64_t act_size_, kv_size_;
  const std::int64_t most_kv_here_;  // on the device
  std::optional<Allocation> best_;
  double best_score_ = 0;
};

// A placement, and a time that no run with it comes below.
struct Candidate {
  Allocation blocks;
  double bound = 0;
  bool holds_largest = false;  // request

  bool better_than(const Candidate& other) const {
    return holds_largest != other.holds_largest ? holds_largest : bound < other.bound;
  }
};

class Search {
 public:
  Search(const Profile& profile, const AllocationInputs& inputs)
      : profile_(profile), inputs_(inputs) {}

  // The candidate of the least bound; nothing where no block fits.
  std::optional<Candidate> best_bound() const {
    std::optional<Candidate> best;
    const auto consider = [&](std::int64_t act) {
      const auto candidate = fullest(act);
      if (candidate && (!best || candidate->better_than(*best))) {
        best = candidate;
      }
    };
    std::int64_t low = 0, high = inputs_.most_blocks;
    while (high - low > kEveryShare) {
      for (std::int64_t i = 0; i <= kGrid; ++i) {
        consider(low + (high - low) * i / kGrid);
      }
      const std::int64_t step = (high - low) / kGrid + 1;
      const std::int64_t middle = best ? std::clamp(best->blocks.all_act_blocks(), low, high) : low;
      low = std::max(low, middle - step);
      high = std::min(high, middle + step);
    }
    for (std::int64_t act = low; act <= high; ++act) {
      consider(act);
    }
    return best;
  }

  // The candidate with the best rehearsal. Bounds select the candidates to rehearse. Numbers of ACT blocks
  // are such that a request of average length has a whole number of them. If candidates differ in the
  // number of rounds, the best one for each number is rehearsed over the whole job, from the first prompt
  // to the last answer.
  Candidate best_rehearsed(const Candidate& first) {
    const std::int64_t unit = std::max(inputs_.sequences, 1);
    const std::int64_t most = inputs_.most_blocks / unit;
    std::vector<Candidate> coarse{first};
    for (std::int64_t i = 0; i <= kShares; ++i) {
      add_with_layers(i == kShares ? inputs_.most_blocks : most * i / kShares * unit, coarse);
    }
    add_with_layers(first.blocks.all_act_blocks() / unit * unit, coarse);
    std::ranges::sort(coarse, {}, &Candidate::bound);
    rehearse_all(first, coarse);
    rehearse_near();
    const Candidate estimated = best_;
    std::map<std::int64_t, std::vector<Candidate>> by_rounds;
    for (const Candidate& candidate : coarse) {
      if (candidate.bound < kWorthRehearsal * best_time_ &&
          candidate.holds_largest == estimated.holds_largest) {
        by_rounds[rounds_of(inputs_, candidate.blocks)].push_back(candidate);
      }
    }
    by_rounds[rounds_of(inputs_, estimated.blocks)];
    if (!inputs_.rehearse_job || by_rounds.rbegin()->first == 1) {
      return estimated;
    }
    return best_of_whole_jobs(estimated, by_rounds);
  }

 private:
  static constexpr std::int64_t kShares = 16;
  static constexpr std::int64_t kLayers = 6;
  static constexpr std::int64_t kNear = 4;  // blocks of each request

  // This number of ACT blocks, and as many KV blocks as requests can fill and as fit; with
  // `layers` layers on the device, or any number of them.
  std::optional<Candidate> fullest(std::int64_t act, std::int32_t layers = -1) const {
    std::int64_t fit = inputs_.most_blocks - act;
    const auto place = [&](std::int64_t kv) {
      return Placing(profile_, inputs_, act, kv).run(layers);
    };
    auto placed = place(fit);
    if (!placed) {
      std::int64_t beyond = fit;
      fit = act > 0 ? 0 : 1;
      placed = place(fit);
      while (placed && beyond - fit > 1) {
        const std::int64_t middle = fit + (beyond - fit) / 2;
        const auto more = place(middle);
        (more ? fit : beyond) = middle;
        placed = more ? more : placed;
      }
    }
    if (!placed) {
      return std::nullopt;
    }
    return Candidate{.blocks = *placed,
                     .bound = score(profile_, inputs_, *placed),
                     .holds_largest = act + fit >= inputs_.largest_request};
  }

  // More layers on the device may leave room for fewer requests. Adds the most layers that fit beside all
  // blocks, the most layers at all, and a few smaller numbers.
  void add_with_layers(std::int64_t act, std::vector<Candidate>& candidates) const {
    const auto most_blocks = fullest(act);
    if (!most_blocks) {
      return;
    }
    const std::int64_t kv = most_blocks->blocks.all_kv_blocks();
    std::int32_t beside = inputs_.layers;
    while (beside > 0 && !Placing(profile_, inputs_, act, kv).run(beside)) {
      --beside;
    }
    std::int32_t at_all = inputs_.layers;
    while (at_all > beside && !Placing(profile_, inputs_, act, act > 0 ? 0 : 1).run(at_all)) {
      --at_all;
    }
    for (const std::int32_t most : {beside, at_all}) {
      for (std::int64_t i = 0; i <= kLayers; ++i) {
        if (const auto one = fullest(act, static_cast<std::int32_t>(most * i / kLayers))) {
          candidates.push_back(*one);
        }
      }
    }
  }

  // The best of all in `best_`. REQUIRES: by rising bounds.
  void rehearse_all(const Candidate& first, const std::vector<Candidate>& candidates) {
    best_ = first;
    best_time_ = std::numeric_limits<double>::infinity();
    rehearsals_ = 0;
    for (const Candidate& candidate : candidates) {
      rehearse(candidate);
    }
  }

  // Refines around the best one, in ACT blocks and in layers.
  void rehearse_near() {
    const std::int64_t unit = std::max(inputs_.sequences, 1);
    std::int64_t acts = inputs_.most_blocks / unit / kShares, layers = inputs_.layers / kLayers;
    for (; acts + layers > 0; acts /= 2, layers /= 2) {
      const std::int64_t act = best_.blocks.all_act_blocks();
      const std::int32_t here = best_.blocks.resident_layers.value_or(0);
      for (const std::int64_t to : {act - acts * unit, act, act + acts * unit}) {
        for (const std::int64_t kept : {here - layers, std::int64_t{here}, here + layers}) {
          if (to >= 0 && to <= inputs_.most_blocks && kept >= 0 && kept <= inputs_.layers) {
            if (const auto near = fullest(to, static_cast<std::int32_t>(kept))) {
              rehearse(*near);
            }
          }
        }
      }
    }
  }

  Candidate best_of_whole_jobs(const Candidate& estimated,
                               const std::map<std::int64_t, std::vector<Candidate>>& by_rounds) {
    Candidate best = estimated;
    auto least = inputs_.rehearse_job(profile_, estimated.blocks);
    const auto compare = [&](const Candidate& candidate) {
      const auto time = inputs_.rehearse_job(profile_, candidate.blocks);
      if (time && time->n < least->n) {
        best = candidate;
        least = time;
      }
    };
    if (!least) {
      return estimated;  // the job is too long to rehearse
    }
    for (const auto& [rounds, candidates] : by_rounds) {
      if (!candidates.empty()) {
        rehearse_all(candidates.front(), candidates);
        rehearse_near();
        compare(best_);
      }
    }
    // Estimates ignore which requests wait for which; that decides between more and fewer ACT blocks.
    const std::int64_t unit = std::max(inputs_.sequences, 1);
    for (std::int64_t step = kNear; step > 0; step /= 2) {
      const Allocation from = best.blocks;
      for (const std::int64_t act :
           {from.all_act_blocks() - step * unit, from.all_act_blocks() + step * unit}) {
        if (act >= 0 && act <= inputs_.most_blocks) {
          if (const auto near = fullest(act, from.resident_layers.value_or(0))) {
            if (near->holds_largest == best.holds_largest) {
              compare(*near);
            }
          }
        }
      }
    }
    return best;
  }

  void rehearse(const Candidate& candidate) {
    const bool best_holds = best_.holds_largest;
    if ((best_holds && !candidate.holds_largest) || rehearsals_ == kMaxRehearsals ||
        (candidate.holds_largest == best_holds && kSlack * candidate.bound >= best_time_)) {
      return;
    }
    ++rehearsals_;
    const auto times = inputs_.rehearse(profile_, candidate.blocks);
    if (!times) {
      return;
    }
    const double time = work_time(profile_, inputs_, candidate.blocks, *times);
    if (time < best_time_ * (1 - kWorthwhile) || (candidate.holds_largest && !best_holds)) {
      best_ = candidate;
      best_time_ = time;
    }
  }

  const Profile& profile_;
  const AllocationInputs& inputs_;
  Candidate best_;
  double best_time_ = 0;
  int rehearsals_ = 0;
};

}  // namespace

std::optional<Allocation> best_placement(const Profile& profile, const AllocationInputs& inputs,
                                         std::int64_t act_blocks, std::int64_t kv_blocks) {
  check(inputs.layers > 0, "a model has layers");
  return Placing(profile, inputs, act_blocks, kv_blocks).run();
}

Allocation best_allocation(const Profile& profile, const AllocationInputs& inputs) {
  Search search(profile, inputs);
  const auto best = search.best_bound();
  if (!best) {
    return {};
  }
  return inputs.rehearse && inputs.device ? search.best_rehearsed(*best).blocks : best->blocks;
}

}  // namespace poise
