#include "loader/loader.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "common/files/json.h"
#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"
#include "common/words.h"

namespace poise {
namespace {

constexpr const char* kSocket = "loader.sock";
constexpr const char* kCard = "loader.json";
constexpr const char* kLeaves = "weights.digests";
constexpr Seconds kWaitWhileBusy{0.005};
constexpr Seconds kWait{0.05};
constexpr Seconds kWaitWhileChecking{0.01};  // a fifth of a core checks 300 MB/s
// A pool's memory is free only after the executor that mapped it has unmapped it or ended.
constexpr auto kUntilRoom = std::chrono::seconds(20);
// The planner ends, and then its supervisor ends this process.
constexpr auto kDamagedStays = std::chrono::seconds(30);

void check_options(const LoaderOptions& options) {
  const bool hex = std::ranges::all_of(
      options.run_id, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  if (!hex || options.run_id.empty() || options.run_id.size() >= sizeof(ControlSegment::run_id)) {
    fail("--run-id must be 1 to {} lower-case hexadecimal digits, not \"{}\"",
         sizeof(ControlSegment::run_id) - 1, shown(options.run_id));
  }
  struct stat status {};
  const std::string home = shown(options.home.string(), 300);
  if (stat(options.home.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    fail("--home {} is no directory", home);
  }
  if (status.st_uid != geteuid() || (status.st_mode & 077) != 0) {
    fail("--home {} is open to other users: chmod 700 it", home);
  }
}

ModelOnDisk model_of(const LoaderOptions& options) {
  return open_model(options.model, load_options(options));
}

// `shape`: what the segment holds. Of weights that could not be packed it is a plain one, whatever the options say.
WeightLoading::Origin origin_of(const LoaderOptions& options, const ModelShape& shape) {
  WeightLoading::Origin origin{.leaves = options.home / kLeaves, .open = nullptr};
  if (options.adopt) {
    LoaderOptions held = options;
    held.pack_weights =
        shape.packed.codes == Codes::bfloat12 ? PackWeights::automatic : PackWeights::off;
    origin.open = [held] { return model_of(held); };
  }
  return origin;
}

}  // namespace

LoadOptions load_options(const LoaderOptions& options) {
  return {.dtype = options.dtype,
          .format = options.load_format,
          .seed = options.seed,
          .quantization = options.quantization,
          .pack_weights = options.pack_weights};
}

struct Loader::Beginning {
  ModelOnDisk model;
  HostBudget budget;
  Control control;
};

// Wrong options are refused before the model is looked at.
Loader::Beginning Loader::begin(const LoaderOptions& options) {
  check_options(options);
  return options.adopt ? adopt(options) : make(options);
}

Loader::Beginning Loader::make(const LoaderOptions& options) {
  ModelOnDisk model = model_of(options);
  HostBudget budget = host_budget(options.host_memory, options.available());
  check_weights_fit(model.layout.total(), budget);
  failpoint("loader.started");
  Control control = Control::create(options.run_id, model.layout.hash());
  return {std::move(model), std::move(budget), std::move(control)};
}

// From the segments alone: the model's files may be gone by now.
Loader::Beginning Loader::adopt(const LoaderOptions& options) {
  Control control = Control::attach(options.run_id);
  const auto state =
      static_cast<LoaderState>(control->loader_state.load(std::memory_order_acquire));
  if ((state != LoaderState::sealed && state != LoaderState::loading) ||
      control->fingerprint_ready.load(std::memory_order_acquire) == 0) {
    fail(Exit::interrupted, "the loader of run {} ended before its weights were whole",
         options.run_id);
  }
  SharedModel shared = model_in(*control);
  ModelOnDisk model{.config = {}};
  model.config.shape = shared.shape;
  model.dtype = shared.dtype;
  model.layout = std::move(shared.layout);
  PoolPartition pool{};
  if (control->pool_epoch.load(std::memory_order_acquire) != 0) {
    pool = control->pool;
    const KvFormat format = control->kv_format;
    if (format > KvFormat::int4) {
      fail(Exit::foreign, "the pool in the control segment of run {} has KV blocks of format {}",
           options.run_id, static_cast<std::uint32_t>(format));
    }
    if (const auto reason = why_no_partition(
            pool, block_sizes(model.config.shape, model.dtype, format), model.layout.layers)) {
      fail(Exit::foreign, "the pool in the control segment of run {} is none: {}", options.run_id,
           *reason);
    }
  }
  const auto released = control->released_layers.load(std::memory_order_acquire);
  const Bytes held = model.layout.total() - model.layout.layer.bytes * released +
                     Bytes{static_cast<std::int64_t>(pool.region_bytes)} * model.layout.layers;
  HostBudget budget = host_budget(options.host_memory, options.available() + held);
  return {std::move(model), std::move(budget), std::move(control)};
}

Loader::Loader(const LoaderOptions& options) : Loader(options, begin(options)) {}

Loader::Loader(const LoaderOptions& options, Beginning beginning)
    : options_(options),
      model_(std::move(beginning.model)),
      budget_(std::move(beginning.budget)),
      control_(std::move(beginning.control)),
      control_name_{segment_name(options.run_id, "control")},
      channel_(serve((options.home / kSocket).string(),
                     {.run_id = options.run_id, .layout_hash = model_.layout.hash()})),
      weights_(control_, model_, origin_of(options, model_.config.shape)),
      check_(weights_),
      pools_(control_, budget_, options.available) {
  if (options.adopt) {
    pools_.adopt();
    pools_.set_released(weights_.released_bytes());
    write_card();
    spdlog::info("run {}: weights and pool adopted, {} in all; no weight is read", options.run_id,
                 gib_text(model_.layout.total()));
  }
  for (const std::string& notice : model_.notices) {
    spdlog::warn("{}", notice);
    fmt::print("warning: {}\n", notice);  // the supervisor relays it
  }
  std::fflush(stdout);
  if (budget_.notice) {
    spdlog::warn("{}", *budget_.notice);
  }
  spdlog::info("run {}: {} of {} as {}, weights {}, host memory {}", options_.run_id,
               model_.config.architecture, counted(model_.config.shape.num_hidden_layers, "layer"),
               name_of(model_.dtype), gib_text(model_.layout.total()), gib_text(budget_.cap));
  control_->loader_epoch.fetch_add(1, std::memory_order_release);
}

Loader::~Loader() {
  failpoint("loader.draining");
  if (!control_name_.left) {
    control_->loader_state.store(static_cast<std::uint32_t>(LoaderState::draining),
                                 std::memory_order_release);
    // All names before any memory: giving back many GiB may take longer than this process may live.
    pools_.unlink();
    weights_.unlink();
    unlink_segment(control_name_.name);
  }
  std::error_code ignored;
  for (const char* name : {kCard, kSocket, kLeaves}) {
    if (name != kLeaves || !control_name_.left) {
      std::filesystem::remove(options_.home / name, ignored);
    }
  }
  failpoint("loader.unlinked");
}

bool Loader::step() {
  bool moved = weights_.advance();
  if (moved && weights_.sealed()) {
    write_card();
    failpoint("loader.sealed");
    pools_.set_released(weights_.released_bytes());
    if (!restore_asked_) {
      tell_restored(weights_.why_not_restored());
    }
  }
  if (restore_asked_ && weights_.sealed() && !pools_.busy()) {
    begin_restoring();
  }
  // A pool is made only beside the weights' memory, so that what is available is known.
  if (weights_.has_segment() && (pools_.busy() || pools_.is_growing())) {
    if (auto grant = pools_.advance()) {
      moved = true;
      if (!send(*channel_, std::move(*grant))) {
        spdlog::warn("the planner that claimed a block pool is gone");
      }
    }
  }
  pools_.look_at_spare();
  const std::optional<Received> message = receive();
  moved = (!message && go_on_checking()) || moved;
  // Reserving memory, or waiting for it, takes seconds for many GiB, and shows nowhere meanwhile.
  const bool reserving =
      weights_.reserving() || pools_.busy() || pools_.is_growing() || restore_asked_;
  if (moved || message || reserving) {
    control_->progress[static_cast<int>(Process::loader)].steps.fetch_add(
        1, std::memory_order_release);
  }
  return !message || handle(**message);
}

// Nothing may compute with damaged weights: from then on no process attaches, and the supervisor ends this one with its
// run, kept or not. True if a planner waits for the check.
bool Loader::go_on_checking() {
  const auto now = std::chrono::steady_clock::now();
  if (damaged_since_ && now - *damaged_since_ > kDamagedStays) {
    fail(Exit::interrupted, "the weights in shared memory were damaged");
  }
  const bool hurries = check_.hurries();
  if (auto checked = check_.advance()) {
    if (!checked->sound) {
      spdlog::error("{}", checked->sentence);
    }
    if (checked->damaged) {
      damaged_since_ = now;
      control_->loader_state.store(static_cast<std::uint32_t>(LoaderState::draining),
                                   std::memory_order_release);
    }
    send(*channel_, std::move(*checked));
  }
  return hurries;
}

bool Loader::can_leave() const {
  return !damaged_since_ && weights_.sealed() && !pools_.busy() && !restore_asked_ && !awaited_;
}

void Loader::leave() {
  check(can_leave(), "a loader leaves between two requests");
  weights_.leave();
  pools_.leave();
  control_name_.left = true;
}

// A peer that sends an unreadable message is told so, and ignored until it sends Hello again: a loader
// that is kept must survive its planners.
std::optional<Received> Loader::receive() {
  const bool busy = !weights_.sealed() || pools_.busy();
  try {
    return channel_->receive(check_.hurries() ? Seconds{0}
                             : busy           ? kWaitWhileBusy
                             : check_.is_idle() ? kWait
                                                : kWaitWhileChecking);
  } catch (const Failure& failure) {
    spdlog::error("{}", failure.what());
    send(*channel_, messages::StopT{.reason = failure.what()});
    return std::nullopt;
  }
}

bool Loader::handle(const messages::Message& message) {
  switch (message.body_type()) {
    case messages::Body::Hello:
      greet(*message.body_as_Hello());
      return true;
    case messages::Body::PoolClaim: {
      const auto* claim = message.body_as_PoolClaim();
      const std::uint64_t cap = std::min<std::uint64_t>(claim->host_memory(), INT64_MAX);
      pools_.claim({.partition = {.region_bytes = claim->region_bytes(),
                                  .act_blocks = claim->act_blocks(),
                                  .kv_blocks = claim->kv_blocks()},
                    .kv_format = static_cast<KvFormat>(claim->kv_format())},
                   cap > 0 ? std::optional(Bytes{static_cast<std::int64_t>(cap)}) : std::nullopt);
      return true;
    }
    case messages::Body::PoolPartitionChange: {
      const auto* change = message.body_as_PoolPartitionChange();
      send(*channel_, pools_.move_border(change->act_blocks(), change->kv_blocks()));
      return true;
    }
    case messages::Body::PoolRelease:
      send(*channel_, pools_.release());
      return true;
    case messages::Body::WeightsRelease:
      release_weights(message.body_as_WeightsRelease()->resident_layers());
      return true;
    case messages::Body::WeightsRestore:
      restore_asked_ = std::chrono::steady_clock::now();  // begins once there is room
      awaited_ = true;
      return true;
    case messages::Body::WeightsCheck: {
      const auto* check = message.body_as_WeightsCheck();
      check_.begin(check->serial(), check->at_once());
      return true;
    }
    case messages::Body::Stop: {
      const auto* reason = message.body_as_Stop()->reason();
      spdlog::info("told to stop: {}", reason != nullptr ? shown(reason->string_view(), 300) : "");
      return false;
    }
    default:
      spdlog::warn("a {} is no message for a loader; it is ignored",
                   messages::EnumNameBody(message.body_type()));
      return true;
  }
}

void Loader::release_weights(std::int32_t resident_layers) {
  if (weights_.sealed() && weights_.released() > 0 && weights_.released() == resident_layers) {
    return tell_weights();  // asked for twice, as a planner does whose loader was replaced meanwhile
  }
  if (!weights_.sealed() || weights_.released() > 0) {
    return tell_weights(weights_.sealed() ? "weights are released already"
                                          : "the weights are not there yet");
  }
  if (resident_layers < 0 || resident_layers > model_.layout.layers) {
    return tell_weights(fmt::format("{} cannot be released of a model of {}",
                                    counted(resident_layers, "layer"), model_.layout.layers));
  }
  weights_.release(resident_layers);
  pools_.set_released(weights_.released_bytes());
  tell_weights();
}

void Loader::begin_restoring() {
  if (weights_.released() == 0) {
    restore_asked_.reset();
    return tell_restored();
  }
  if (const auto why_not = pools_.why_no_room(weights_.released_bytes())) {
    if (pools_.drop_spare()) {
      return;  // its memory is free soon
    }
    const auto waited = std::chrono::steady_clock::now() - *restore_asked_;
    if (pools_.there() || waited > kUntilRoom) {
      restore_asked_.reset();
      tell_restored(*why_not);
    }
    return;
  }
  restore_asked_.reset();
  weights_.restore();
  pools_.set_released({});  // their place is taken from now on
}

void Loader::tell_restored(std::string why_not) {
  if (std::exchange(awaited_, false)) {
    tell_weights(std::move(why_not));
  }
}

void Loader::tell_weights(std::string why_not) {
  messages::WeightsHeldT held;
  held.done = why_not.empty();
  held.released_layers = weights_.released();
  held.sentence = std::move(why_not);
  send(*channel_, std::move(held));
}

void Loader::greet(const messages::Hello& hello) {
  pools_.forget_claim();
  awaited_ = false;  // the planner that waited is gone
  const auto* fingerprint = hello.fingerprint();
  if (fingerprint != nullptr && fingerprint->size() > 0 && weights_.sealed() &&
      !std::equal(fingerprint->begin(), fingerprint->end(), std::begin(control_->fingerprint),
                  std::end(control_->fingerprint))) {
    send(*channel_, messages::StopT{.reason = "the loader holds another model than this run's"});
    return;
  }
  spdlog::info("process {} says hello", hello.pid());
  messages::LoaderReplyT reply;
  reply.loader_epoch = control_->loader_epoch.load(std::memory_order_acquire);
  reply.sealed = weights_.sealed();
  send(*channel_, std::move(reply));
}

// What a later run needs to know of a kept loader before it attaches.
void Loader::write_card() const {
  const nlohmann::json card{
      {"pid", getpid()},
      {"run_id", options_.run_id},
      {"model", std::filesystem::absolute(options_.model).string()},
      {"dtype", name_of(model_.dtype)},
      {"load_format", options_.load_format == LoadFormat::dummy ? "dummy" : "auto"},
      {"seed", options_.seed},
      {"quantization", name_of(options_.quantization)},
      {"weights_bytes", model_.layout.total().n},
      {"host_memory", budget_.cap.n},
      {"fingerprint", to_hex(std::to_array(control_->fingerprint))},
      {"state", "sealed"}};
  replace_file(options_.home / kCard,
               card.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace poise
