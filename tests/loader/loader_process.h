#pragma once
// A loader as its planner meets it: over a real socket and real shared memory, stepped by hand.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/process.h"
#include "loader/loader.h"
#include "tests/support/model_files.h"

namespace poise::testing_support {

inline std::string fresh_run_id() {
  static int count = 0;
  return fmt::format("{:x}{:04x}{:x}", getpid(), ++count,
                     std::chrono::steady_clock::now().time_since_epoch().count() & 0xffffff);
}

inline bool exists(const std::string& segment) {
  return std::filesystem::exists("/dev/shm/" + segment);
}

class LoaderProcess : public ::testing::Test {
 protected:
  LoaderProcess() {
    open_log("loader", "");
    std::filesystem::create_directory(home_);
    chmod(home_.c_str(), 0700);
    std::filesystem::create_directory(model_);
    write_model(model_, {.shape = tiny_shape()});
  }

  LoaderOptions options() const { return {.model = model_, .home = home_, .run_id = run_id_}; }

  LoaderOptions adopting() const {
    LoaderOptions options = this->options();
    options.adopt = true;
    return options;
  }

  void start(const LoaderOptions& options) {
    loader_ = std::make_unique<Loader>(options);
    between_loaders_.reset();
  }
  void start() { start(options()); }

  // The loader makes room for a successor. Until that one begins, the run's memory is held here, as it is by a supervisor: any `poise`
  // that begins beside this test removes what no process holds.
  void leave() {
    ASSERT_TRUE(loader_->can_leave());
    between_loaders_.emplace(control());
    loader_->leave();
    loader_.reset();
  }

  // Steps the loader until `happened`; fails after a while.
  void step_until(const std::function<bool()>& happened) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!happened()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "it never happened";
      running_ = running_ && loader_->step();
      if (!running_) {
        return;
      }
    }
  }

  std::string segment(const std::string& what) const { return segment_name(run_id_, what); }
  Control control() const { return Control::attach(run_id_); }
  LoaderState state() const { return static_cast<LoaderState>(control()->loader_state.load()); }
  void wait_for_seal() {
    step_until([&] { return state() == LoaderState::sealed; });
  }

  std::unique_ptr<Channel> connected_planner() {
    auto planner = connect((home_ / "loader.sock").string(),
                           {.run_id = run_id_, .layout_hash = control()->layout_hash});
    step_until([&] {
      planner->receive({0.001});
      return planner->connected();
    });
    return planner;
  }
  messages::HelloT hello() const {
    messages::HelloT hello;
    hello.protocol = kProtocol;
    hello.build = build_id();
    hello.layout_hash = control()->layout_hash;
    hello.process = static_cast<std::uint32_t>(Process::planner);
    hello.pid = static_cast<std::uint32_t>(getpid());
    return hello;
  }
  // What comes back after `body` was sent.
  template <typename Table>
  messages::MessageT ask(Channel& planner, Table body) {
    EXPECT_TRUE(send(planner, std::move(body)));
    std::optional<Received> answer;
    step_until([&] {
      answer = planner.receive({0.001});
      return answer.has_value();
    });
    messages::MessageT message;
    if (answer) {
      (*answer)->UnPackTo(&message);
    }
    return message;
  }
  template <typename Table>
  messages::PoolGrantT ask_for_pool(Channel& planner, Table body) {
    const messages::MessageT answer = ask(planner, std::move(body));
    const auto* grant = answer.body.AsPoolGrant();
    return grant != nullptr ? *grant : messages::PoolGrantT{};
  }
  // A pool, all of whose memory stands.
  messages::PoolGrantT whole_pool(Channel& planner, const messages::PoolClaimT& wanted) {
    const messages::PoolGrantT grant = ask_for_pool(planner, wanted);
    EXPECT_TRUE(grant.granted) << grant.sentence;
    step_until([&] { return control()->pool_standing.load() >= wanted.region_bytes; });
    return grant;
  }
  static messages::WeightsReleaseT released(std::uint32_t layers) {
    messages::WeightsReleaseT release;
    release.resident_layers = layers;
    return release;
  }

  static messages::PoolClaimT claim(std::uint64_t region_bytes, std::uint32_t act,
                                    std::uint32_t kv) {
    messages::PoolClaimT claim;
    claim.region_bytes = region_bytes;
    claim.act_blocks = act;
    claim.kv_blocks = kv;
    return claim;
  }

  TempDirectory directory_;
  std::filesystem::path home_ = directory_.path() / "home";
  std::filesystem::path model_ = directory_.path() / "model";
  std::string run_id_ = fresh_run_id();
  std::unique_ptr<Loader> loader_;
  std::optional<Control> between_loaders_;
  bool running_ = true;
};

}  // namespace poise::testing_support
