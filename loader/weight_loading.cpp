#include "loader/weight_loading.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <span>

#include "common/trouble.h"
#include "loader/host_budget.h"

namespace poise {
namespace {

constexpr auto kTellEvery = std::chrono::seconds(2);

void set_state(Control& control, LoaderState state) {
  control->loader_state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
}

template <typename T>
bool ready(const std::future<T>& future) {
  return future.valid() && future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace

WeightLoading::WeightLoading(Control& control, const ModelOnDisk& model)
    : control_(control),
      model_(model),
      name_(segment_name(control.run_id(), "weights")),
      began_(Clock::now()),
      told_(began_) {
  control_->shape = model.config.shape;
  control_->dtype = model.dtype;
  control_->weights_bytes = static_cast<std::uint64_t>(model.layout.total().n);
  coming_ = std::async(std::launch::async, [this, size = model.layout.total()] {
    return Segment::create(name_, size, [this] { return given_up_.load(); });
  });
}

WeightLoading::~WeightLoading() {
  fill_.reset();
  given_up_ = true;
  if (coming_.valid()) {
    coming_.wait();
  }
  unlink_segment(name_);
}

bool WeightLoading::advance() {
  if (sealed_) {
    return false;
  }
  if (!segment_) {
    if (!ready(coming_)) {
      return false;
    }
    begin_filling();
    return true;
  }
  if (fill_->done()) {
    seal();
    return true;
  }
  tell_progress();
  const std::uint64_t loaded = control_->loaded_bytes.load(std::memory_order_acquire);
  return std::exchange(seen_bytes_, loaded) != loaded;
}

void WeightLoading::begin_filling() {
  segment_.emplace(coming_.get());
  set_state(control_, LoaderState::loading);
  fill_.emplace(*model_.source,
                std::span(segment_->data(), static_cast<std::size_t>(segment_->size().n)),
                model_.dtype, fill_threads(), control_->loaded_bytes);
}

void WeightLoading::seal() {
  const Digest fingerprint = model_fingerprint(model_.config, model_.dtype, fill_->digest());
  const Bytes total = fill_->total();
  fill_.reset();
  segment_->seal();
  std::ranges::copy(fingerprint, control_->fingerprint);
  control_->fingerprint_ready.store(1, std::memory_order_release);
  set_state(control_, LoaderState::sealed);
  sealed_ = true;
  const Seconds time{std::chrono::duration<double>(Clock::now() - began_).count()};
  spdlog::info("weights are loaded: {} as {} in {:.1f} s, {:.2f} GB/s, fingerprint {}",
               gib_text(total), name_of(model_.dtype), time.n, rate(total, time) / 1e9,
               to_hex(fingerprint));
}

void WeightLoading::tell_progress() {
  const Clock::time_point now = Clock::now();
  if (now - told_ < kTellEvery) {
    return;
  }
  told_ = now;
  const Bytes loaded{
      static_cast<std::int64_t>(control_->loaded_bytes.load(std::memory_order_acquire))};
  const double speed = rate(loaded, {std::chrono::duration<double>(now - began_).count()});
  const auto rest = static_cast<double>((fill_->total() - loaded).n);
  spdlog::info("loading weights: {} of {} ({:.0f} %), {:.2f} GB/s, {:.0f} s left", gib_text(loaded),
               gib_text(fill_->total()),
               100.0 * static_cast<double>(loaded.n) / static_cast<double>(fill_->total().n),
               speed / 1e9, speed > 0 ? rest / speed : 0);
}

}  // namespace poise
