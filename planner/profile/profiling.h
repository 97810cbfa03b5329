#pragma once
// What is ordered to learn what everything costs (cost_model.h), and what its times say. The orders
// are ordinary iterations whose mini-batches differ in size: one of them brings every size of a kind
// in every layer, so that a handful of iterations measures all lines, each point many times.
//
//   context, apart      one-row sequences with n KV or n ACT blocks, each size between two tiny
//                       mini-batches: while it loads or computes, the other streams rest
//   context, together   the same without the tiny ones: every stream works
//   context, busy       ACT blocks, of the device and as many from the host as the link brings
//                       meanwhile, one iteration behind the other: the device never rests
//   context, few        one or a few one-row sequences and nothing else: what keeps no device busy, so
//                       that its clock is high
//   prompts, KV / ACT   r new rows without context, stored as KV or as ACT blocks
//   prompts, here       the same, stored in the ACT blocks that stay on the device: not measured
//
// Prompts come first, so that all blocks hold activations when they are made into keys and values. A
// GPU multiplies zeros faster than numbers, since it draws less power and keeps its clock: on an H200
// kv_gen reached 930 TFLOP/s on blocks that nobody had written, and 600 to 670 in runs. KV Gen and
// decode attention are what bounds a busy device, so that their lines are of a work of their own,
// behind eight seconds of the same that nobody measures: a clock that load and heat lower is low then;
// prompts are measured behind that once more.
// (717 TFLOP/s where a fifth of the time went by waiting for copies within the device.) Blocks of the
// pool are loaded again and again: a small pool stands for a large one. Pure functions of sizes and
// reports; profiler.h talks with the executor.

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
  context_busy
};
// Those that are measured, in this order.
inline constexpr std::array<ProfileWork, 6> kProfileWork{
    ProfileWork::prompts_kv,    ProfileWork::prompts_act,      ProfileWork::context_few,
    ProfileWork::context_apart, ProfileWork::context_together, ProfileWork::context_busy};

// How large the largest mini-batches are made.
struct ProfileScale {
  std::int32_t blocks = 0;  // loaded, of one kind
  std::int32_t rows = 0;    // of prompts
};
inline constexpr ProfileScale kFirstProfileScale{.blocks = 8, .rows = 8};
inline constexpr ProfileScale kLargestProfileScale{.blocks = 576, .rows = 2048};

// What `context_busy` keeps a device busy with, which then has the clock of long work: power and heat
// bound that. `repeats` mini-batches of `blocks` and somewhat less come before those of the scale: a
// product's time rises in steps, and these tell where. Of each one's ACT blocks the share `from_host`
// crosses the link, the others are on the device.
struct BusyWork {
  std::int32_t repeats = 0, blocks = 0;
  double from_host = 0;
};
// For mini-batches of `blocks`: of each layer, as much as to bring another's weights and these blocks
// does not quite fill its time. `layers`: all; `streamed`: those whose weights are brought.
BusyWork busy_work(const Profile& profile, std::int32_t blocks, std::int32_t layers,
                   std::int32_t streamed);
// How long an iteration of it computes at least.
Seconds time_of(const BusyWork& busy, const Profile& profile, std::int32_t layers);

// The pool and the buffers that the orders of a scale need.
struct ProfileSizes {
  ProfileScale scale;
  Allocation host;
  DeviceLimits device;
  BusyWork busy;
};
// `scale` or, where `cap` does not hold its buffers, half of it and so on; fails as check_fits does
// where nothing fits, and where no request fills a block. `host_bytes`: for the pool, all layers
// together.
ProfileSizes profile_sizes(const ModelShape& shape, DType dtype, ProfileScale scale,
                           Bytes host_bytes, Bytes overhead, Bytes cap);

// The tables of one iteration. `round` of `rounds`: how many rows the head has differs with it.
messages::IterationT profile_iteration(ProfileWork work, const ProfileSizes& sizes,
                                       const ModelShape& shape, std::uint64_t iteration,
                                       std::uint64_t pool_epoch, int round, int rounds);

// Whether the work's iterations have times for the line.
bool measures(ProfileWork work, Line Profile::*line);

// The scale at which one iteration takes about `budget` beside the weights, judged by `first`, the
// lines of a smaller one.
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
  // Of iterations that follow each other as fast as they are ordered, untraced: how long the device
  // rested between two.
  void add_between(Seconds rest);

  // Lines of the machine `profile` is named for; its other fields stay as they are.
  void fit(Profile& profile) const;

  // Points that lie further from their line than chance puts them, by line and n.
  using Outliers = std::vector<std::pair<Line Profile::*, double>>;
  Outliers outliers() const;
  // Their times are forgotten, to be measured again.
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
  std::array<Samples, 16> lines_;  // in the order of profile_lines()
  std::vector<double> between_, event_latencies_;
};

// Which of the points lie further, in proportion to their height, from the line through all others
// than five times those others' middle distance, than a tenth, and than a thread may wake late.
std::vector<std::size_t> far_points(std::span<const Point> points);

}  // namespace poise
