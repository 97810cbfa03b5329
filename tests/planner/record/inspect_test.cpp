// `inspect` on logs that no planner wrote, with sound CRCs, as tests/fuzz/order_log_fuzz.cpp makes them.

#include "planner/record/inspect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <span>
#include <sstream>

#include "common/files/json.h"
#include "common/order_log.h"
#include "planner/record/check/log_check.h"
#include "planner/record/log_note.h"
#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing_support::complaint;
using testing_support::ScratchDirectory;

constexpr const char* kSoundHeader =
    R"({"layers":2,"kv_row_bytes":256,"act_row_bytes":128,"piece_bytes":[64]})";

class InspectTest : public testing::Test {
 protected:
  template <typename... Tables>
  void record(Tables... tables) {
    OrderLog log(path_, header_, {.keeps = keeps_, .size = {}});
    (log_note(log, "run", std::move(tables)), ...);
  }
  // As a planner of this epoch records what an executor of that epoch sends.
  template <typename Table>
  void record_of(const std::string& run_id, std::uint32_t planner, std::uint32_t executor,
                 Table table) {
    messages::MessageT message;
    message.run_id = run_id;
    message.planner_epoch = planner;
    message.executor_epoch = executor;
    message.body.Set(std::move(table));
    flatbuffers::FlatBufferBuilder builder;
    messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
    OrderLog(path_, header_)
        .append(std::as_bytes(std::span(builder.GetBufferPointer(), builder.GetSize())));
  }
  std::string inspected(bool json, bool brief = false) const {
    const std::filesystem::path printed = folder_ / "printed";
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen(printed.c_str(), "w"),
                                                              std::fclose);
    inspect({.log = path_, .json = json, .brief = brief}, out.get());
    std::fflush(out.get());
    return testing_support::content_of(printed);
  }

  ScratchDirectory folder_;
  std::filesystem::path path_ = folder_ / "orders.log";
  std::string header_ = kSoundHeader;
  LogKeeps keeps_ = LogKeeps::full;
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

// The lines of that type.
std::vector<nlohmann::json> lines_of(const std::string& text, const std::string& type) {
  std::vector<nlohmann::json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    nlohmann::json json = nlohmann::json::parse(line);
    if (json.value("type", "") == type) {
      lines.push_back(std::move(json));
    }
  }
  return lines;
}

messages::IterationT iteration_of(std::uint64_t number,
                                  const std::vector<messages::Sequence>& sequences) {
  messages::IterationT iteration;
  iteration.iteration = number;
  auto batch = std::make_unique<messages::MiniBatchT>();
  batch->sequences = sequences;
  for (const messages::Sequence& sequence : sequences) {
    batch->tokens.resize(batch->tokens.size() + sequence.new_tokens());
    batch->prompt_tokens.push_back(7);
  }
  iteration.mini_batches.push_back(std::move(batch));
  return iteration;
}

messages::IterationDoneT answers_of(std::uint64_t number,
                                    const std::vector<std::pair<std::uint32_t, int>>& tokens) {
  messages::IterationDoneT done;
  done.iteration = number;
  for (const auto& [request, token] : tokens) {
    auto result = std::make_unique<messages::SampleResultT>();
    result->request = request;
    result->token = token;
    done.results.push_back(std::move(result));
  }
  return done;
}

TEST_F(InspectTest, ABriefLineCountsAnIterationsRowsAndTokensAndEachRequests) {
  record(iteration_of(1, {{3, 0, 7, 0, 0}, {9, 0, 4, 7, 0}}), answers_of(1, {{3, 55}, {9, -1}}),
         iteration_of(2, {{3, 7, 1, 0, 0}, {9, 4, 3, 1, 0}}), answers_of(2, {{3, 56}, {9, 57}}),
         iteration_of(3, {{3, 8, 1, 0, 0}}));  // not finished
  const std::string text = inspected(true, true);
  const auto iterations = lines_of(text, "iteration");
  ASSERT_EQ(iterations.size(), 2U);
  EXPECT_EQ(iterations[0]["rows"], 11);
  EXPECT_EQ(iterations[0]["tokens"], 1);
  EXPECT_EQ(iterations[1]["context"], 11);
  EXPECT_EQ(iterations[1]["tokens"], 2);
  const auto requests = lines_of(text, "request");
  ASSERT_EQ(requests.size(), 2U);
  EXPECT_EQ(requests[0]["request"], 3);
  EXPECT_EQ(requests[0]["rows"], 8);
  EXPECT_EQ(requests[0]["tokens"], 2);
  EXPECT_EQ(requests[0]["prompt_tokens"], 7);
  EXPECT_EQ(requests[0]["first_s"], iterations[0]["sent_s"]);
  EXPECT_EQ(requests[1]["done_s"], iterations[1]["done_s"]);
  EXPECT_TRUE(lines_of(text, "layer").empty());
  EXPECT_TRUE(lines_of(inspected(true), "request").empty());
}

messages::LayerOrderT order_of(std::uint64_t number) {
  messages::LayerOrderT order;
  order.iteration = number;
  return order;
}

messages::LayerDoneT report_of(std::uint64_t number) {
  messages::LayerDoneT report;
  report.iteration = number;
  report.copy_in = std::make_unique<messages::StreamReport>(64, 2'000'000, 0);
  report.compute = std::make_unique<messages::StreamReport>(0, 3'000'000, 0);
  return report;
}

TEST_F(InspectTest, OfALogOfTablesNoTimesAreTold) {
  keeps_ = LogKeeps::tables;
  for (std::uint64_t number = 1; number <= 6; ++number) {
    record(iteration_of(number, {{3, 7, 1, 0, 0}}), order_of(number), report_of(number),
           answers_of(number, {{3, 55}}));
  }
  EXPECT_THAT(inspected(false), AllOf(HasSubstr("iteration 6 at"), HasSubstr("is not known"),
                                      HasSubstr("6 iterations have no reports"),
                                      Not(HasSubstr("T_PCIe")), Not(HasSubstr("0 %"))));
  for (const bool brief : {false, true}) {
    const std::string text = inspected(true, brief);
    const auto iterations = lines_of(text, "iteration"), balance = lines_of(text, "balance");
    ASSERT_EQ(iterations.size(), 6U);
    EXPECT_FALSE(iterations[0].contains("balance"));
    ASSERT_EQ(balance.size(), 1U);
    EXPECT_EQ(balance[0].at("without_reports"), 6);
    EXPECT_FALSE(balance[0].contains("whole"));
  }
}

TEST_F(InspectTest, IterationsOfTablesAreLeftOutOfTheBalance) {
  const auto iterate = [&](std::uint64_t number) {
    record(iteration_of(number, {{3, 7, 1, 0, 0}}), order_of(number), report_of(number),
           answers_of(number, {{3, 55}}));
  };
  iterate(1);
  keeps_ = LogKeeps::tables;
  iterate(2);
  keeps_ = LogKeeps::full;
  iterate(3);
  const std::string text = inspected(true);
  const auto iterations = lines_of(text, "iteration");
  ASSERT_EQ(iterations.size(), 3U);
  EXPECT_EQ(iterations[0]["balance"]["t_compute"], 0.003);
  EXPECT_FALSE(iterations[1].contains("balance"));
  const nlohmann::json balance = lines_of(text, "balance").at(0);
  EXPECT_EQ(balance.at("without_reports"), 1);
  EXPECT_EQ(balance["whole"]["iterations"], 2);
  EXPECT_EQ(balance["whole"]["t_pcie"], 0.004);
  EXPECT_EQ(balance["last"].size(), 2U);
  EXPECT_THAT(inspected(false), HasSubstr("1 iteration has no reports (--orders-log tables)"));
}

TEST_F(InspectTest, ABriefLogNamesEachProcessThatGoesOnForAnother) {
  record_of("run", 1, 5, messages::ReadyT{});
  record(messages::PolicyInForceT{});  // a note has no epochs
  record_of("run", 1, 5, messages::ReadyT{});
  record_of("run", 2, 5, messages::ReadyT{});
  record_of("run", 2, 6, messages::ReadyT{});
  record_of("another", 1, 7, messages::ReadyT{});
  std::vector<std::string> names;
  for (const nlohmann::json& line : lines_of(inspected(true, true), "successor")) {
    names.push_back(line["of"]);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"planner", "gpu_executor", "attempt"}));
}

TEST_F(InspectTest, APolicysNameIsMadeFitForATerminal) {
  messages::PolicyInForceT policy;
  policy.policy = "\x1b[31m\n\xff";
  record(std::move(policy));
  EXPECT_THAT(inspected(false), HasSubstr(R"(policy \x1b[31m\x0a\xff at)"));
  EXPECT_THAT(inspected(true), HasSubstr(R"("policy":"\\x1b[31m\\x0a\\xff")"));
}

TEST_F(InspectTest, AHeaderIsMadeFitForATerminal) {
  header_ = kSoundHeader;
  header_.insert(1, "\"x\x7f\":1,");
  record(messages::ReadyT{});
  EXPECT_THAT(inspected(false), HasSubstr(R"({"x\x7f":1,)"));
}

TEST_F(InspectTest, AHeaderOfSeveralLinesIsOneOfJson) {
  header_ = kSoundHeader;
  header_.insert(1, "\n\r\n");
  record(messages::ReadyT{});
  EXPECT_THAT(inspected(true), StartsWith(std::string(kSoundHeader) + "\n"));
}

TEST_F(InspectTest, WhatStandsBehindANulInAHeaderIsRefused) {
  header_ = std::string(kSoundHeader) + std::string("\0\xee", 2);
  record(messages::ReadyT{});
  EXPECT_THAT(complaint([&] { inspected(true); }).sentence, HasSubstr("a NUL byte"));
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
