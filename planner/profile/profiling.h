#pragma once
// The iterations that measure costs (cost_model.h), and the evaluation of their times. They are ordinary
// iterations whose mini-batches differ in size: one iteration has every size of a kind in every layer, so
// a handful of iterations measures all lines, each point many times.
//
//   context, apart      one-row sequences with n KV or n ACT blocks, each size between two tiny
//                       mini-batches: while it loads or computes, the other streams rest
//   context, together   the same without the tiny ones: every stream works
//   context, host       1 to 32 one-row sequences of equal length that host cores attend, and nothing else: T_host
//                       alone
//   context, host, link the same behind loads of KV and of ACT blocks that outlast them: T_host beside a link that is
//                       never idle, and the loads beside host cores
//   context, absorbed   one-row sequences that attend ACT blocks as they are, rows of one block each and a few rows
//                       of many: nothing else of it is measured
//   context, busy       ACT blocks, of the device and as many from the host as the link brings
//                       meanwhile, one iteration behind the other: the device never rests
//   context, few        one or a few one-row sequences and nothing else: what keeps no device busy, so
//                       that its clock is high
//   prompts, KV / ACT   r new rows without context, stored as KV or as ACT blocks
//   prompts, here       the same, stored in the ACT blocks that stay on the device: not measured
//
// Prompts come first, so that all blocks hold activations when keys and values are regenerated from
// them. A GPU multiplies zeros faster than other numbers, since it draws less power and keeps a higher
// clock: on an H200 kv_gen reached 930 TFLOP/s on blocks never written, and 600 to 670 in runs (717 if
// a fifth of the time was spent waiting for copies within the device). KV Gen and decode attention limit
// a busy device. So their lines have a work of their own, after eight seconds of the same work as
// warm-up: then load and heat have lowered the clock as in a run. Prompts are measured once more after
// that. Blocks of the pool are loaded repeatedly: a small pool stands for a large one. Pure functions of
// sizes and reports; profiler.h talks to the executor.

#include <array>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"

namespace poise {

enum class ProfileWork : std::uint8_t {
  prompts_here,
  prompts_kv,
  prompts_act,
  context_few,
  context_apart,
  context_together,
  context_host,       // where host cores attend: they alone,
  context_host_link,  // and beside a link that is never idle
  context_absorbed,   // where the model's activations can be attended as they are
  context_busy
};
// Those that are measured, in this order; where host cores attend, their two come behind them, and where the model's
// activations can be attended as they are, that one.
inline constexpr std::array<ProfileWork, 6> kProfileWork{
    ProfileWork::prompts_kv,    ProfileWork::prompts_act,      ProfileWork::context_few,
    ProfileWork::context_apart, ProfileWork::context_together, ProfileWork::context_busy};

// The size of the largest mini-batches.
struct ProfileScale {
  std::int32_t blocks = 0;  // loaded, of one kind
  std::int32_t rows = 0;    // of prompts
  // That host cores attend in a layer, of all mini-batches together; 0: as many as `blocks`.
  std::int32_t host_blocks = 0;
};
// Of the first pass, which finds the scale. A GPU takes nearly as long for one block as for eight, and makes the keys and
// values of codes as many rows at a time as a mini-batch may have: with 8 rows, a block took many times what it takes in a run.
inline constexpr ProfileScale kFirstProfileScale{.blocks = 8, .rows = 8},
    kFirstProfileScaleOnGpu{.blocks = 32, .rows = 512};
static_assert(kFirstProfileScaleOnGpu.rows >= kFirstProfileScaleOnGpu.blocks * kBlockTokens);
constexpr ProfileScale first_profile_scale(DeviceKind kind) {
  return kind == DeviceKind::cpu ? kFirstProfileScale : kFirstProfileScaleOnGpu;
}
inline constexpr ProfileScale kLargestProfileScale{
    .blocks = 576, .rows = 2048, .host_blocks = 5504};

// The work of `context_busy`, which keeps the device busy at the clock that power and heat allow for long
// work. `repeats` mini-batches of `blocks` and slightly fewer come before those of the scale: a product's
// time rises in steps, and these show where. The share `from_host` of each one's ACT blocks crosses the
// link; the others are on the device.
struct BusyWork {
  std::int32_t repeats = 0, blocks = 0;
  double from_host = 0;
};
// For mini-batches of `blocks`: as much work in each layer that loading another layer's weights and these
// blocks takes slightly less time. `layers`: all; `streamed`: those whose weights are loaded.
BusyWork busy_work(const Profile& profile, std::int32_t blocks, std::int32_t layers,
                   std::int32_t streamed);
// The least compute time of one of its iterations.
Seconds time_of(const BusyWork& busy, const Profile& profile, std::int32_t layers);

// The pool and the buffers that the orders of a scale need.
struct ProfileSizes {
  ProfileScale scale;
  Allocation host;
  DeviceLimits device;
  BusyWork busy;
  std::int32_t absorbing_rows = 0;  // that attend many blocks as they are; 0: none is measured
};
// `scale`, halved until its buffers fit `cap`; fails as check_fits does if nothing fits, and if no
// request fills a block. `host_bytes`: for the pool, all layers
// together. `on_host`: for KV blocks that host cores attend beside the device, instead of the pool's; 0: none do.
// `absorbs`: the model's activations can be attended as they are.
ProfileSizes profile_sizes(const ModelShape& shape, DType dtype, ProfileScale scale,
                           Bytes host_bytes, Bytes overhead, Bytes cap,
                           KvFormat kv_format = KvFormat::plain, Bytes on_host = {},
                           bool absorbs = false);

// The tables of one iteration. The head's number of rows depends on `round` of `rounds`.
messages::IterationT profile_iteration(ProfileWork work, const ProfileSizes& sizes,
                                       const ModelShape& shape, std::uint64_t iteration,
                                       std::uint64_t pool_epoch, int round, int rounds);

// Whether the work's iterations have times for the line.
bool measures(ProfileWork work, Line Profile::*line);

// The scale at which one iteration takes about `budget` beside the weights, estimated from `first`, the
// lines of a smaller scale; no smaller than the first pass of such a device. Beside a GPU, host cores have all their blocks.
ProfileScale profile_scale(const Profile& first, std::int32_t layers, Seconds budget);

// Times of all spans, by line and n (profile_times.cpp).
class ProfileTimes {
 public:
  ProfileTimes(const WeightLayout& layout, const DeviceLimits& limits)
      : layout_(layout), limits_(limits) {}

  // Every span of every order of the iteration.
  struct StageSpan {
    std::uint32_t stage;
    messages::Span span;
  };
  void add(ProfileWork work, const messages::IterationT& tables,
           const std::vector<StageSpan>& spans);
  // How long the device was idle between two iterations, of untraced iterations ordered as fast as
  // possible.
  void add_between(Seconds rest);

  // Fills the lines of `profile`; its other fields stay unchanged.
  void fit(Profile& profile) const;

  // Outliers, by line and n.
  using Outliers = std::vector<std::pair<Line Profile::*, double>>;
  Outliers outliers() const;
  // Drops their times, so that they are measured again.
  void forget(const Outliers& outliers);

 private:
  struct Time {
    double seconds;
    double overlap;  // share of it in which another stream worked
  };
  struct Samples {
    std::map<double, std::vector<Time>> by_n;
    std::int32_t remeasured = 0;
  };
  class Reader;

  void add(Line Profile::*line, double n, Time time);
  static std::vector<Point> medians(const Samples& samples, bool alone);
  Samples& samples(Line Profile::*line);

  WeightLayout layout_;
  DeviceLimits limits_;
  std::array<Samples, 22> lines_;  // in the order of profile_lines()
  std::vector<double> between_, event_latencies_;
  double absorbing_rows_ = 0;  // of each time that is known of `absorb`
};

// The points whose relative distance from the line through all others exceeds five times the others'
// median distance and a tenth, and whose absolute distance exceeds a thread's wake-up delay.
std::vector<std::size_t> far_points(std::span<const Point> points);

}  // namespace poise
