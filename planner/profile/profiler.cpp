#include "planner/profile/profiler.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/trouble.h"
#include "planner/costs/measuring_build.h"
#include "planner/memory/sizes.h"

namespace poise {
namespace {

constexpr Bytes kLargestPool = kGiB * 2;
constexpr Bytes kLargestHostPool = kGiB * 24;  // of blocks that host cores attend
// Of what is free, each of these may take one part. The first pass's pool stands while the second one's is made. Host cores need
// memory that no cache holds, of large models, too: with an eighth, those of OPT-30B read 120 MB of a layer, again and again.
constexpr std::int64_t kShareOfHost = 8, kShareOfHostCores = 3;
// Time for all works of full size, beside their weights. In this time a GPU can run mini-batches as large
// as those of runs, at its clock under steady load; CPU cores run smaller ones.
constexpr Seconds kMeasuring{2}, kMeasuringOnGpu{5};
constexpr int kSmaller = 4;           // factor by which the other works are smaller
constexpr std::int32_t kVisits = 24;  // of each size, all layers and rounds together, at least
constexpr Seconds kHeating{8};        // until heat has lowered the clock to its steady value
constexpr double kMaxHeats = 100;
// Iterations of a few sequences that generate, for the time between them: tables as those of runs in
// which it counts. Those of many prompts take longer to build, check and send.
constexpr int kRests = 8;

}  // namespace

Profiler::Profiler(ProfiledMachine machine, const ControlSegment& control, LoaderLink& loader,
                   ExecutorLink& executor)
    : machine_(std::move(machine)),
      layout_(weight_layout(machine_.shape, machine_.dtype)),
      control_(control),
      loader_(loader),
      executor_(executor) {
  profile_.name = machine_.device;
  profile_.kind = machine_.kind;
  profile_.kv_format = machine_.kv_format;
  profile_.build = measuring_build();
  profile_.fingerprint =
      profile_fingerprint(machine_.device, machine_.shape, machine_.dtype, machine_.kv_format);
  profile_.model = model_fingerprint(machine_.shape, machine_.dtype, machine_.kv_format);
  profile_.gpu_memory = machine_.gpu_memory;
  profile_.gpu_overhead = machine_.gpu_overhead;
  profile_.host_memory = machine_.host_memory;
  begin(first_profile_scale(machine_.kind), 1);  // may fail
  executor_.watch([this](const messages::LayerDone& done) {
    rest_ += {static_cast<double>(done.rested_ns()) * 1e-9};
    if (done.spans() != nullptr) {
      for (const messages::Span* span : *done.spans()) {
        spans_.push_back({done.stage(), *span});
      }
    }
  });
}

Profiler::~Profiler() { executor_.watch(nullptr); }

void Profiler::begin(ProfileScale scale, int rounds) {
  const Bytes pool = std::min(kLargestPool, machine_.host_free / kShareOfHost);
  const Bytes attended = machine_.attends_on_host
                             ? std::min(kLargestHostPool, machine_.host_free / kShareOfHostCores)
                             : Bytes{0};
  const Bytes tables =
      machine_.kind == DeviceKind::cpu ? Bytes{0} : page_tables_of(kLargestPool + attended);
  sizes_ =
      profile_sizes(machine_.shape, machine_.dtype, scale, pool, machine_.gpu_overhead + tables,
                    machine_.gpu_memory, machine_.kv_format, attended, machine_.absorbs);
  // Cores need no heat, nor does the pass that only finds the scale.
  works_.begin(rounds, !small_ && machine_.kind != DeviceKind::cpu, sizes_.device.host_attention,
               sizes_.device.absorption);
  times_.emplace(layout_, sizes_.device);
  const BlockSizes blocks = block_sizes(machine_.shape, machine_.dtype, machine_.kv_format);
  loader_.claim(region_bytes(blocks, sizes_.host), sizes_.host);
  phase_ = Phase::claiming;
}

// The works of a busy device. All others say how many blocks the link brings meanwhile.
void Profiler::begin_busy() {
  times_->fit(profile_);
  if (!works_.heats()) {
    works_.add_busy(0);
    return;
  }
  const std::int32_t streamed = layout_.layers - sizes_.device.resident_layers;
  sizes_.busy = busy_work(profile_, sizes_.scale.blocks, layout_.layers, streamed);
  const double iteration = time_of(sizes_.busy, profile_, layout_.layers).n;
  works_.add_busy(static_cast<std::size_t>(
      std::clamp(std::ceil(kHeating.n / std::max(iteration, 1e-9)), 1.0, kMaxHeats)));
}

bool Profiler::step_executor(Seconds timeout) {
  const bool moved = executor_.step(timeout);
  if (executor_.gone() || executor_.returned()) {
    fail(Exit::interrupted, "the gpu_executor is gone");
  }
  return moved;
}

bool Profiler::step(Seconds timeout) {
  bool moved = false;
  switch (phase_) {
    case Phase::claiming:
      moved = loader_.step(timeout);
      if (loader_.grant()) {
        executor_.configure(sizes_.device, machine_.gpu_memory, layout_, true);
        phase_ = Phase::configuring;
      }
      break;
    case Phase::configuring:
      moved = step_executor(timeout);
      // Loads take up to twice as long while the pool's memory is made and registered behind them.
      if (executor_.ready() && control_.pool_standing.load(std::memory_order_acquire) >=
                                   loader_.grant()->partition.region_bytes) {
        phase_ = Phase::measuring;
        go_on();
      }
      break;
    case Phase::measuring:
      moved = step_executor(timeout);
      if (executor_.take_results()) {
        if (rested_) {
          if (rest_.n > 0) {  // none before the first
            times_->add_between(rest_);
          }
        } else if (!work_.warms_up && work_.work != ProfileWork::prompts_here) {
          times_->add(work_.work, tables_, spans_);
        }
        go_on();
      }
      break;
    case Phase::over:
      break;
  }
  return moved;
}

void Profiler::go_on() {
  if (works_.empty()) {
    next_pass();
    return;
  }
  work_ = works_.take();
  const ProfileSequence::Work& next = work_;
  spans_.clear();
  rest_ = {};
  ++iteration_;
  if (!small_) {
    const auto left = static_cast<double>(works_.left());
    const auto begun = static_cast<double>(iteration_);
    share_ = std::max(share_, begun / (begun + left + kRests));
  }
  // One round in three is of full size; the others bring sizes between.
  ProfileSizes sizes = sizes_;
  if (next.round % kFewestRounds != 0) {
    sizes.scale.blocks = std::max(1, sizes.scale.blocks / kSmaller - next.round);
    sizes.scale.rows = std::max(1, sizes.scale.rows / kSmaller - next.round);
    sizes.scale.host_blocks /= kSmaller;
  }
  messages::IterationT tables =
      profile_iteration(next.work, sizes, machine_.shape, iteration_, loader_.grant()->pool_epoch,
                        next.round, works_.rounds());
  tables_ = tables;
  executor_.begin(std::move(tables), works_.empty());
}

void Profiler::next_pass() {
  if (works_.only_busy_left()) {
    begin_busy();
    go_on();
    return;
  }
  times_->fit(profile_);
  if (std::exchange(small_, false)) {
    const std::int32_t layers = machine_.shape.num_hidden_layers;
    const int rounds = std::max(kFewestRounds, static_cast<int>(ceil_div(kVisits, layers)));
    const auto full =
        static_cast<double>(ceil_div(rounds, kFewestRounds) * std::ssize(kProfileWork));
    const Seconds all = machine_.kind == DeviceKind::cpu ? kMeasuring : kMeasuringOnGpu;
    const ProfileScale scale = profile_scale(profile_, layers, {all.n / full});
    spdlog::info(
        "profiling with up to {} blocks and {} rows; at first a block took {:.1f} (KV) and {:.1f} us (ACT) to load, "
        "{:.1f} to make keys and values and {:.1f} to attend, a row's products {:.1f}",
        scale.blocks, scale.rows, profile_.load_kv.b * 1e6, profile_.load_act.b * 1e6,
        profile_.kv_gen.b * 1e6, profile_.attention.b * 1e6, profile_.forward.b * 1e6);
    begin(scale, rounds);
    return;
  }
  const ProfileTimes::Outliers outliers = times_->outliers();
  if (!outliers.empty() && !std::exchange(repeated_, true)) {
    repeat(outliers);
  } else if (!std::exchange(rested_, true)) {
    works_.repeat({.work = ProfileWork::context_few, .round = 0}, kRests);
    configure_untraced();
    phase_ = Phase::configuring;
  } else {
    check_whole();
    phase_ = Phase::over;
  }
}

// Decisions rest on these. Of two layers, each has its buffer and is brought once.
void Profiler::check_whole() const {
  for (const std::string_view name : {"load_w", "load_kv", "load_act", "kv_gen"}) {
    const bool there = std::ranges::any_of(
        profile_.measured, [&](const MeasuredLine& line) { return line.name == name; });
    check(there || (name == "load_w" && layout_.layers <= 2),
          "a profile has times of all it prices");
  }
}

// Their works again, every round: a size of the head's rows comes in one round alone.
void Profiler::repeat(const ProfileTimes::Outliers& outliers) {
  times_->forget(outliers);
  works_.add([&](ProfileWork work) {
    return std::ranges::any_of(outliers,
                               [&](const auto& one) { return measures(work, one.first); });
  });
  go_on();
}

}  // namespace poise
