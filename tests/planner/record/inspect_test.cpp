// `inspect` on logs that no planner wrote, with sound CRCs, as tests/fuzz/order_log_fuzz.cpp makes them.

#include "planner/record/inspect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "common/order_log.h"
#include "planner/record/log_check.h"
#include "planner/record/log_note.h"
#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

using testing::HasSubstr;
using testing_support::complaint;
using testing_support::ScratchDirectory;

constexpr const char* kSoundHeader =
    R"({"layers":2,"kv_row_bytes":256,"act_row_bytes":128,"piece_bytes":[64]})";

class InspectTest : public testing::Test {
 protected:
  template <typename... Tables>
  void record(Tables... tables) {
    OrderLog log(path_, header_);
    (log_note(log, "run", std::move(tables)), ...);
  }
  std::string inspected(bool json) const {
    const std::filesystem::path printed = folder_ / "printed";
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen(printed.c_str(), "w"),
                                                              std::fclose);
    inspect({.log = path_, .json = json}, out.get());
    std::fflush(out.get());
    return testing_support::content_of(printed);
  }

  ScratchDirectory folder_;
  std::filesystem::path path_ = folder_ / "orders.log";
  std::string header_ = kSoundHeader;
};

messages::IterationT iteration_with(messages::BlockRun run, messages::Sequence sequence) {
  messages::IterationT iteration;
  iteration.iteration = 1;
  auto batch = std::make_unique<messages::MiniBatchT>();
  batch->loads = {run};
  batch->sequences = {sequence, sequence};
  batch->entries.resize(
      4, {messages::Where::LoadedKv, messages::Kind::Kv, messages::Place::Nowhere, 0, 0, 0});
  iteration.mini_batches.push_back(std::move(batch));
  return iteration;
}

TEST_F(InspectTest, AKindThatIsNoneIsCountedAsOneThatIs) {
  const auto kind = static_cast<messages::Kind>(200);
  record(iteration_with({kind, messages::Place::Host, 16, 3, 0, 0}, {1, 0, 1, 0, 0}));
  EXPECT_THAT(inspected(false), HasSubstr("0 KV and 3 ACT blocks to load"));
}

TEST_F(InspectTest, SequencesWhoseTokensOverflowAreShownAsTheyStand) {
  for (const messages::Sequence sequence : {messages::Sequence{1, 0xffffffff, 2, 0, 0},
                                            {1, 0xfffffff0, 0, 0, 0},
                                            {1, 0, 0xffffffff, 0, 0}}) {
    std::filesystem::remove(path_);
    record(iteration_with({messages::Kind::Kv, messages::Place::Host, 0, 0, 0, 0}, sequence));
    EXPECT_THAT(inspected(false), HasSubstr("iteration 1"));
    EXPECT_TRUE(nlohmann::json::accept(inspected(true).substr(0, inspected(true).find('\n'))));
  }
}

TEST_F(InspectTest, APolicysNameIsMadeFitForATerminal) {
  messages::PolicyInForceT policy;
  policy.policy = "\x1b[31m\n\xff";
  record(std::move(policy));
  EXPECT_THAT(inspected(false), HasSubstr(R"(policy \x1b[31m\x0a\xff at)"));
  EXPECT_THAT(inspected(true), HasSubstr(R"("policy":"\\x1b[31m\\x0a\\xff")"));
}

TEST_F(InspectTest, ClocksFarApartAreNoOverflow) {
  messages::ConfigureT configure;
  configure.log_began_ns = 1;
  messages::ReadyT ready;
  ready.device_began_ns = std::uint64_t{1} << 63;
  record(std::move(configure), std::move(ready));
  EXPECT_THAT(inspected(false), HasSubstr("ready at"));
}

TEST_F(InspectTest, AModelOfMoreLayersThanThereAreIsRefused) {
  header_ = R"({"layers":1073741824,"kv_row_bytes":256,"act_row_bytes":128,"piece_bytes":[64]})";
  record(messages::ReadyT{});
  EXPECT_THAT(complaint([&] { inspected(false); }).sentence,
              HasSubstr("an integer from 1 to 1024"));
  EXPECT_THAT(complaint([&] { check_log(path_); }).sentence,
              HasSubstr("an integer from 1 to 1024"));
}

}  // namespace
}  // namespace poise
