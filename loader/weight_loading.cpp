#include "loader/weight_loading.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <span>
#include <utility>

#include "common/device_memory.h"
#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "common/words.h"
#include "loader/host_budget.h"
#include "loader/strides.h"

namespace poise {
namespace {

constexpr auto kTellEvery = std::chrono::seconds(2);

std::string name_in(const Control& control) { return segment_name(control.run_id(), "weights"); }

void set_state(Control& control, LoaderState state) {
  control->loader_state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
}

// Without the file a successor cannot restore released layers; nothing else hangs on it.
void write_leaves(const std::filesystem::path& path, std::span<const Digest> leaves) {
  const auto bytes = std::as_bytes(leaves);
  try {
    replace_file(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                 {.durable = false});
  } catch (const Failure& failure) {
    spdlog::warn("{}", failure.what());
  }
}

std::vector<Digest> read_leaves(const std::filesystem::path& path) {
  const RegularFile file(path);
  std::vector<Digest> leaves(static_cast<std::size_t>(file.size().n) / sizeof(Digest));
  file.read_exactly(0, std::as_writable_bytes(std::span(leaves)));
  return leaves;
}

template <typename T>
bool ready(const std::future<T>& future) {
  return future.valid() && future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace

WeightLoading::WeightLoading(Control& control, ModelOnDisk& model, Origin origin)
    : control_(control),
      model_(model),
      origin_(std::move(origin)),
      began_(Clock::now()),
      told_(began_) {
  if (origin_.open) {
    adopt();
    return;
  }
  control_->shape = model_.config.shape;
  control_->dtype = model_.dtype;
  control_->weights_bytes = static_cast<std::uint64_t>(model_.layout.total().n);
  coming_ = std::async(std::launch::async, [this] {
    std::vector<std::uint64_t> layers;  // each may be released alone
    for (std::uint32_t layer = 0; layer < static_cast<std::uint32_t>(model_.layout.layers); ++layer) {
      layers.push_back(model_.layout.layer_offset({layer}));
      layers.push_back(layers.back() + static_cast<std::uint64_t>(model_.layout.layer.bytes.n));
    }
    return Segment::create(name_in(control_), model_.layout.total(),
                           [this] { return given_up_.load(); }, layers);
  });
}

// What the ended loader was about to do with released layers is done again: holes are made twice without
// harm, and a planner asks once more for layers that were being restored.
void WeightLoading::adopt() {
  segment_.emplace(Segment::adopt(name_in(control_)));
  if (segment_->size() != model_.layout.total()) {
    fail(Exit::foreign, "shared memory {} has {} bytes, the model's weights take {}",
         segment_->name(), segment_->size().n, model_.layout.total().n);
  }
  released_ = static_cast<std::int32_t>(control_->released_layers.load(std::memory_order_acquire));
  give_back_released();
  set_state(control_, LoaderState::sealed);
  sealed_ = true;
}

void WeightLoading::leave() {
  check(sealed_, "whole weights are left to a successor");
  left_ = true;
}

WeightLoading::~WeightLoading() {
  fill_.reset();
  given_up_ = true;
  if (coming_.valid()) {
    coming_.wait();
  }
  if (reserving_.valid()) {
    reserving_.wait();
  }
  if (!left_) {
    unlink();
  }
}

void WeightLoading::unlink() { unlink_segment(name_in(control_)); }

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
  if (reserving_.valid()) {
    if (!ready(reserving_)) {
      return false;
    }
    begin_filling_again();
    return true;
  }
  if (fill_->done()) {
    released_ > 0 ? sealed_again() : seal();
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
                fill_threads(), control_->loaded_bytes);
}

void WeightLoading::seal() {
  const Digest fingerprint = model_fingerprint(model_.config, model_.dtype, fill_->digest());
  const Bytes total = fill_->total();
  leaves_ = fill_->take_leaves();
  fill_.reset();
  failpoint("loader.unsealed");
  segment_->seal();
  for_each_stride(segment_->size(), [&](std::uint64_t begin, std::uint64_t end) {
    segment_->forget_pages(begin, {static_cast<std::int64_t>(end - begin)});
    return true;
  });
  write_leaves(origin_.leaves, leaves_);
  std::ranges::copy(fingerprint, control_->fingerprint);
  control_->fingerprint_ready.store(1, std::memory_order_release);
  set_state(control_, LoaderState::sealed);
  sealed_ = true;
  const Seconds time{std::chrono::duration<double>(Clock::now() - began_).count()};
  spdlog::info("weights are loaded: {} as {} in {:.1f} s, {:.2f} GB/s, {} in huge pages, fingerprint {}",
               gib_text(total), name_of(model_.dtype), time.n, rate(total, time) / 1e9,
               gib_text(segment_->huge()), to_hex(fingerprint));
}

bool WeightLoading::is_released(LayerId layer) const {
  return is_resident({.resident_layers = released_}, layer, model_.layout.layers);
}

Bytes WeightLoading::released_bytes() const { return model_.layout.layer.bytes * released_; }

void WeightLoading::release(std::int32_t resident_layers) {
  check(sealed_ && released_ == 0, "whole weights are released");
  check(resident_layers >= 0 && resident_layers <= model_.layout.layers, "of the model's layers");
  // Announces the release first, then makes the holes: a process that reads the number in time does not
  // touch them.
  released_ = resident_layers;
  control_->released_layers.store(static_cast<std::uint32_t>(released_), std::memory_order_release);
  give_back_released();
  spdlog::info("on a device alone: {} of {}; {} of host memory given back", released_,
               counted(model_.layout.layers, "layer"), gib_text(released_bytes()));
}

void WeightLoading::give_back_released() {
  for (std::uint32_t layer = 0; layer < static_cast<std::uint32_t>(model_.layout.layers); ++layer) {
    if (is_released({layer})) {
      segment_->give_back(model_.layout.layer_offset({layer}), model_.layout.layer.bytes);
    }
  }
}

void WeightLoading::restore() {
  check(sealed_ && released_ > 0, "released weights are restored");
  why_not_.clear();
  sealed_ = false;
  began_ = told_ = Clock::now();
  control_->loaded_bytes.store(
      static_cast<std::uint64_t>((model_.layout.total() - released_bytes()).n),
      std::memory_order_release);
  set_state(control_, LoaderState::loading);
  reserving_ = std::async(std::launch::async, [this] {
    for (std::uint32_t layer = 0; layer < static_cast<std::uint32_t>(model_.layout.layers);
         ++layer) {
      if (is_released({layer})) {
        segment_->reserve_again(model_.layout.layer_offset({layer}), model_.layout.layer.bytes,
                                [this] { return given_up_.load(); });
      }
    }
  });
}

void WeightLoading::begin_filling_again() {
  try {
    reserving_.get();
    open_source();
  } catch (const Failure& failure) {
    why_not_ = failure.what();
    spdlog::warn("released weights are not back: {}", why_not_);
    give_back_released();
    set_state(control_, LoaderState::sealed);
    sealed_ = true;
    return;
  }
  fill_.emplace(
      *model_.source, std::span(segment_->data(), static_cast<std::size_t>(segment_->size().n)),
      fill_threads(), control_->loaded_bytes,
      [this](std::uint32_t slab) { return slab > 0 && is_released({slab - 1}); },
      std::move(leaves_));
}

// A successor knows the weights' digests from its predecessor's file. They are right if the fingerprint
// follows from them.
void WeightLoading::open_source() {
  if (!origin_.open) {
    return;
  }
  ModelOnDisk model = origin_.open();
  std::vector<Digest> leaves = read_leaves(origin_.leaves);
  const Digest fingerprint = model_fingerprint(model.config, model.dtype, root_of(leaves));
  if (!std::ranges::equal(fingerprint, control_->fingerprint)) {
    fail(Exit::foreign, "the model's files are no longer those that were loaded");
  }
  model_ = std::move(model);
  leaves_ = std::move(leaves);
  origin_.open = nullptr;
}

FilledWeights WeightLoading::filled() {
  check(sealed_, "sealed weights are compared");
  open_source();
  return {.source = *model_.source,
          .segment = {segment_->data(), static_cast<std::size_t>(segment_->size().n)},
          .leaves = leaves_};
}

void WeightLoading::sealed_again() {
  leaves_ = fill_->take_leaves();
  const Bytes total = fill_->total();
  fill_.reset();
  released_ = 0;
  control_->released_layers.store(0, std::memory_order_release);
  set_state(control_, LoaderState::sealed);
  sealed_ = true;
  const Seconds time{std::chrono::duration<double>(Clock::now() - began_).count()};
  spdlog::info("released weights are back: {} in {:.1f} s, {:.2f} GB/s", gib_text(total), time.n,
               rate(total, time) / 1e9);
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
