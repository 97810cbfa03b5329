#include "planner/policies/host_placement.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "planner/policies/allocation.h"
#include "planner/policies/best_placement.h"
#include "planner/policies/work_time.h"

namespace poise {
namespace {

constexpr std::int32_t kHostSteps = 8;  // numbers of requests that are tried first
constexpr std::int64_t kActSteps = 8;   // shares of ACT blocks likewise
constexpr double kGainOfHost = 0.995;   // of the time without host cores; more is not worth it

// A placement of all requests, with a time that no run with it comes below.
struct Placed {
  Allocation blocks;
  double bound = std::numeric_limits<double>::infinity();
  std::int32_t on_host = 0;
  std::int64_t act = 0;
  bool holds_largest = false;  // request

  bool better_than(const Placed& other) const {
    return holds_largest != other.holds_largest ? holds_largest : bound < other.bound;
  }
};

// All requests on host cores: as many layers on the device as fit.
Allocation all_on_host(const AllocationInputs& rest) {
  Allocation blocks{.placed = rest.device.has_value()};
  if (rest.fixed.resident_layers) {
    blocks.resident_layers = rest.fixed.resident_layers;
  } else if (rest.resident_layers) {
    blocks.resident_layers = rest.resident_layers(0, 0, rest.host_blocks);
  }
  return blocks;
}

// The same, as many blocks as fit: some requests may have to wait.
Allocation all_that_fit_on_host(const AllocationInputs& inputs) {
  Allocation blocks = split_host(inputs, 0);
  AllocationInputs rest = inputs;
  rest.host_blocks = blocks.kv_blocks;
  const Allocation placed = all_on_host(rest);
  blocks.host_share = 1;
  blocks.host_blocks = blocks.kv_blocks;
  blocks.placed = placed.placed;
  blocks.resident_layers = placed.resident_layers;
  return blocks;
}

class HostSearch {
 public:
  HostSearch(const Profile& profile, const AllocationInputs& inputs)
      : profile_(profile), inputs_(inputs) {}

  // Of this number of requests on host cores.
  Placed best_of(std::int32_t on_host) const {
    Placed best;
    const auto rest = beside_host(inputs_, on_host);
    if (!rest) {
      return best;
    }
    const std::int64_t most = rest->most_blocks;
    if (most == 0) {
      return placed(*rest, all_on_host(*rest), on_host);
    }
    const auto consider = [&](std::int64_t act) {
      const Placed one = with_act(*rest, std::clamp<std::int64_t>(act, 0, most), on_host);
      best = one.better_than(best) ? one : best;
    };
    if (inputs_.most_blocks <= kEveryShare) {
      for (std::int64_t act = 0; act <= most; ++act) {
        consider(act);
      }
      return best;
    }
    for (std::int64_t i = 0; i <= kActSteps; ++i) {
      consider(most * i / kActSteps);
    }
    for (std::int64_t step = most / kActSteps / 2; step > most / 128; step /= 2) {
      const std::int64_t middle = best.act;
      consider(middle - step);
      consider(middle + step);
    }
    return best;
  }

  // Calls `consider` with numbers of requests on host cores; it returns the best so far, near which others are.
  template <typename Consider>
  void each_number(const Consider& consider) const {
    // What the user wants on the device is attended there.
    const std::int32_t all =
        inputs_.fixed.gpu_share.value_or(0) > 0 ? 0 : std::max(inputs_.sequences, 1);
    if (inputs_.most_blocks <= kEveryShare) {
      for (std::int32_t n = 0; n <= all; ++n) {
        consider(n);
      }
      return;
    }
    std::int32_t best = 0;
    for (std::int32_t i = 0; i <= kHostSteps; ++i) {
      best = consider(all * i / kHostSteps);
    }
    for (std::int32_t step = all / kHostSteps / 2; step > all / 128; step /= 2) {
      const std::int32_t middle = best;
      for (const std::int32_t n : {middle - step, middle + step}) {
        best = n >= 0 && n <= all ? consider(n) : best;
      }
    }
  }

 private:
  // As many KV blocks as fit beside these.
  Placed with_act(const AllocationInputs& rest, std::int64_t act, std::int32_t on_host) const {
    std::int64_t fit = rest.most_blocks - act;
    auto blocks = best_placement(profile_, rest, act, fit);
    if (!blocks) {
      std::int64_t beyond = fit;
      fit = act > 0 ? 0 : 1;
      blocks = best_placement(profile_, rest, act, fit);
      while (blocks && beyond - fit > 1) {
        const std::int64_t middle = fit + (beyond - fit) / 2;
        const auto more = best_placement(profile_, rest, act, middle);
        (more ? fit : beyond) = middle;
        blocks = more ? more : blocks;
      }
    }
    return blocks ? placed(rest, *blocks, on_host, act) : Placed{};
  }

  Placed placed(const AllocationInputs& rest, const Allocation& blocks, std::int32_t on_host,
                std::int64_t act = 0) const {
    const Allocation all = with_host(rest, blocks);
    return {.blocks = all,
            .bound = work_time(profile_, inputs_, all, least_times(profile_, rest, blocks)),
            .on_host = on_host,
            .act = act,
            .holds_largest = all.all_act_blocks() + all.all_kv_blocks() >= inputs_.largest_request};
  }

  const Profile& profile_;
  const AllocationInputs& inputs_;
};

}  // namespace

std::optional<AllocationInputs> beside_host(const AllocationInputs& inputs, std::int32_t on_host) {
  const std::int64_t all = std::max(inputs.sequences, 1);
  AllocationInputs rest = inputs;
  if (on_host == 0) {
    return rest;
  }
  const auto part = [&](std::int64_t n) { return n * (all - on_host) / all; };
  rest.host_requests = on_host;
  rest.host_blocks = inputs.most_blocks - part(inputs.most_blocks);
  rest.host = inputs.host -
              (inputs.sizes.block(BlockKind::kv) * rest.host_blocks + Bytes{kRegionAlignment}) *
                  inputs.layers;
  if (rest.host.n < 0) {
    return std::nullopt;
  }
  rest.most_blocks = part(inputs.most_blocks);
  rest.most_tokens = part(inputs.most_tokens);
  rest.sequences = static_cast<std::int32_t>(all - on_host);
  rest.requests = part(inputs.requests);
  rest.prompt_rows = part(inputs.prompt_rows);
  if (inputs.device) {
    rest.device->left = [left = inputs.device->left, of_host = rest.host_blocks](
                            std::int64_t act, std::int64_t kv, std::int64_t) {
      return left(act, kv, of_host);
    };
  }
  const auto together = [requests = on_host, of_host = rest.host_blocks, all](Allocation blocks) {
    AllocationInputs only;
    only.sequences = static_cast<std::int32_t>(all - requests);
    only.host_requests = requests;
    only.host_blocks = of_host;
    return with_host(only, blocks);
  };
  if (inputs.rehearse) {
    rest.rehearse = [rehearse = inputs.rehearse, together](const Profile& profile,
                                                           const Allocation& blocks) {
      return rehearse(profile, together(blocks));
    };
  }
  if (inputs.rehearse_job) {
    rest.rehearse_job = [rehearse = inputs.rehearse_job, together](const Profile& profile,
                                                                   const Allocation& blocks) {
      return rehearse(profile, together(blocks));
    };
  }
  return rest;
}

Allocation with_host(const AllocationInputs& rest, Allocation blocks) {
  if (rest.host_requests == 0) {
    return blocks;
  }
  blocks.kv_blocks += static_cast<std::uint32_t>(rest.host_blocks);
  blocks.host_blocks = static_cast<std::uint32_t>(rest.host_blocks);
  blocks.host_share =
      static_cast<double>(rest.host_requests) / (rest.host_requests + rest.sequences);
  return blocks;
}

Allocation best_three_way(const Profile& profile, const AllocationInputs& inputs) {
  const HostSearch search(profile, inputs);
  Placed best;
  search.each_number([&](std::int32_t n) {
    const Placed one = search.best_of(n);
    best = one.better_than(best) ? one : best;
    return best.on_host;
  });
  return best.blocks;
}

Allocation best_with_host(const Profile& profile, const AllocationInputs& inputs) {
  const Allocation alone = best_allocation(profile, inputs);
  if (!inputs.host_cores || !profile.knows_host() || !inputs.rehearse ||
      inputs.fixed.gpu_share.value_or(0) > 0 ||
      alone.all_act_blocks() + alone.all_kv_blocks() == 0) {
    return alone;
  }
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const auto estimate = [&](const Allocation& blocks) {
    const auto times = inputs.rehearse(profile, blocks);
    return times ? work_time(profile, inputs, blocks, *times) : kNever;
  };
  const auto whole = [&](const Allocation& blocks) {
    return inputs.rehearse_job ? inputs.rehearse_job(profile, blocks) : std::nullopt;
  };
  // The whole job, unless it is too long to rehearse.
  const auto job = whole(alone);
  Placed best{.blocks = alone, .bound = kGainOfHost * (job ? job->n : estimate(alone))};
  const auto consider = [&](const Allocation& blocks, std::int32_t n) {
    if (blocks.host_blocks == 0) {
      return;
    }
    const double time = job ? whole(blocks).value_or(Seconds{kNever}).n : estimate(blocks);
    if (time < best.bound) {
      best = {.blocks = blocks, .bound = time, .on_host = n};
    }
  };
  // The others' blocks as if these requests were all, rehearsed beside those on host cores.
  const auto consider_rehearsed = [&](std::int32_t n) {
    const auto rest = beside_host(inputs, n);
    if (n > 0 && rest && rest->most_blocks > 0) {
      consider(with_host(*rest, best_allocation(profile, *rest)), n);
    }
  };
  const HostSearch search(profile, inputs);
  const std::int32_t all = std::max(inputs.sequences, 1);
  Placed estimated;
  search.each_number([&](std::int32_t n) {
    const Placed one = search.best_of(n);
    if (const double time = n > 0 ? estimate(one.blocks) : kNever; time < estimated.bound) {
      estimated = {.blocks = one.blocks, .bound = time, .on_host = n};
    }
    return estimated.on_host;
  });
  consider(estimated.blocks, estimated.on_host);
  const Allocation bounded = best_three_way(profile, inputs);
  consider(bounded, static_cast<std::int32_t>(std::lround(bounded.host_share * all)));
  consider(all_that_fit_on_host(inputs), all);
  for (std::int32_t step = all / kHostSteps; step > 0 && step >= all / 32; step /= 2) {
    const std::int32_t middle = best.on_host;
    for (const std::int32_t n : {middle - step, middle + step}) {
      if (n > 0 && n < all) {
        consider(search.best_of(n).blocks, n);
      }
    }
  }
  consider_rehearsed(best.on_host);
  return best.blocks;
}

}  // namespace poise
