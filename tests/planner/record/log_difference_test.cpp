#include "planner/record/log_difference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "common/order_log.h"
#include "common/trouble.h"

namespace poise {
namespace {

using testing::HasSubstr;

constexpr const char* kDiffHeader =
    R"({"run_id":"RUN","build":"b","model":"m","dtype":"float16","layers":2})";

// What one run would have logged.
struct LoggedRun {
  std::string header = kDiffHeader;
  std::vector<messages::MessageT> messages;

  template <typename Table>
  Table& add(Table table) {
    messages.emplace_back();
    messages.back().run_id = "run";
    messages.back().body.Set(std::move(table));
    return *static_cast<Table*>(messages.back().body.value);
  }
};

// `late`: an order's report comes only after the next order.
LoggedRun logged_run(std::uint64_t iterations, bool late = false) {
  LoggedRun run;
  messages::ConfigureT configure;
  configure.max_rows = 9;
  run.add(configure);
  run.add(messages::ReadyT{});
  for (std::uint64_t number = 1; number <= iterations; ++number) {
    messages::IterationT tables;
    tables.iteration = number;
    tables.mini_batches.push_back(std::make_unique<messages::MiniBatchT>());
    tables.mini_batches.back()->loads.emplace_back(messages::Kind::Kv, messages::Place::Host, 16, 1,
                                                   0, 17);
    run.add(std::move(tables));
    std::vector<messages::LayerDoneT> reports;
    for (std::uint32_t stage = 0; stage < 4; ++stage) {
      messages::LayerOrderT order;
      order.iteration = number;
      order.stage = stage;
      order.mini_batches = {0};
      run.add(std::move(order));
      messages::LayerDoneT done;
      done.iteration = number;
      done.stage = stage;
      done.copy_in = std::make_unique<messages::StreamReport>(100, late ? 5 : 6, 7);
      if (late && stage == 1) {
        reports.push_back(std::move(done));
        continue;
      }
      for (auto& report : reports) {
        run.add(std::move(report));
      }
      reports.clear();
      run.add(std::move(done));
    }
    messages::IterationDoneT results;
    results.iteration = number;
    results.results.push_back(std::make_unique<messages::SampleResultT>());
    results.results[0]->request = 40;
    results.results[0]->token = 5;
    run.add(std::move(results));
  }
  return run;
}

class LogDiff : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "poise-diff-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path write(const char* name, const LoggedRun& run,
                              const OrderLogLimits& limits = {}) const {
    const auto path = folder_ / name;
    remove_log(path);
    OrderLog log(path, run.header, limits);
    for (const auto& message : run.messages) {
      flatbuffers::FlatBufferBuilder builder;
      messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
      log.append(std::as_bytes(std::span(builder.GetBufferPointer(), builder.GetSize())));
    }
    return path;
  }
  LogDiffReport diff(const LoggedRun& a, const LoggedRun& b, const OrderLogLimits& limits_b = {}) {
    options_ = {.a = write("a", a), .b = write("b", b, limits_b)};
    return diff_logs(options_.a, options_.b, Compared::work);
  }
  // The first line of what is said about two runs of four iterations, of which one was changed.
  std::string after(const std::function<void(LoggedRun&)>& change) {
    LoggedRun changed = logged_run(4);
    change(changed);
    const std::string text = to_text(diff(logged_run(4), changed), options_);
    return text.substr(0, text.find('\n'));
  }

  std::filesystem::path folder_;
  LogDiffOptions options_;
};

template <typename Table>
Table& nth(LoggedRun& run, std::size_t n) {
  for (auto& message : run.messages) {
    if (message.body.type == messages::BodyUnionTraits<Table>::enum_value && n-- == 0) {
      return *static_cast<Table*>(message.body.value);
    }
  }
  throw std::out_of_range("there are not that many");
}

TEST_F(LogDiff, TheSameWorkHasNoDifferenceHoweverReportsAndOrdersAreMixed) {
  const LogDiffReport report = diff(logged_run(4), logged_run(4, true));
  EXPECT_FALSE(report.difference) << to_text(report, options_);
  EXPECT_EQ(report.iterations, 4u);
  EXPECT_EQ(report.records, 2u + 4 * 10);
  EXPECT_THAT(to_json(report, options_), HasSubstr(R"("equal":true)"));
}

TEST_F(LogDiff, TheFirstDifferenceIsNamedByIterationLayerAndField) {
  EXPECT_EQ(after([](LoggedRun& run) {
              nth<messages::IterationT>(run, 1).mini_batches[0]->loads[0] = {
                  messages::Kind::Kv, messages::Place::Host, 16, 1, 0, 23};
              nth<messages::IterationT>(run, 2).mini_batches[0]->id = 9;
            }),
            "first difference: iteration 2, tables, mini-batch 0, loads[0].first_slot: 17 | 23");
  EXPECT_EQ(after([](LoggedRun& run) { nth<messages::LayerOrderT>(run, 6).mini_batches = {1}; }),
            "first difference: iteration 2, order of layer 1, mini_batches[0]: 0 | 1");
  EXPECT_EQ(after([](LoggedRun& run) {
              nth<messages::LayerDoneT>(run, 15).copy_in =
                  std::make_unique<messages::StreamReport>(99, 1, 1);
            }),
            "first difference: iteration 4, report on head, copy_in.bytes: 100 | 99");
  EXPECT_EQ(
      after([](LoggedRun& run) { nth<messages::IterationDoneT>(run, 2).results[0]->token = 9; }),
      "first difference: iteration 3, results, results[0] (request 40).token: 5 | 9");
  EXPECT_EQ(after([](LoggedRun& run) { nth<messages::ConfigureT>(run, 0).max_rows = 8; }),
            "first difference: Configure before the first iteration, max_rows: 9 | 8");
}

TEST_F(LogDiff, ALogThatEndsBeforeTheOtherDiffersThere) {
  EXPECT_EQ(
      after([](LoggedRun& run) { run.messages.resize(run.messages.size() - 10); }),
      "first difference: one log goes on, the next message: iteration 4, tables | the log ends");
  EXPECT_EQ(
      after([](LoggedRun& run) { run.messages.pop_back(); }),
      "first difference: one log goes on, the next message: iteration 4, results | the log ends");
}

TEST_F(LogDiff, AMessageThatIsMissingInTheMiddleIsADifference) {
  EXPECT_EQ(after([](LoggedRun& run) { run.messages.erase(run.messages.begin() + 3); }),
            "first difference: iteration 1, order of embedding, stage: 0 | 1");
  EXPECT_THAT(after([](LoggedRun& run) {
                run.messages.insert(run.messages.begin() + 12, std::move(run.messages[0]));
                run.messages[0] = {};
                run.messages[0].body.Set(messages::ConfigureT(nth<messages::ConfigureT>(run, 0)));
              }),
              HasSubstr("the next one: iteration 2, tables | Configure behind iteration 1"));
}

TEST_F(LogDiff, OfHeadersTheModelCountsAndTheRunDoesNot) {
  EXPECT_EQ(after([](LoggedRun& run) { run.header.replace(run.header.find("RUN"), 3, "NUR"); }),
            "no difference: 4 iterations, 42 records");
  EXPECT_EQ(
      after([](LoggedRun& run) { run.header.replace(run.header.find("float16"), 7, "float32"); }),
      "first difference: header, dtype: \"float16\" | \"float32\"");
  EXPECT_EQ(
      after([](LoggedRun& run) { run.header.replace(run.header.find("float16"), 7, "f\x7f"); }),
      R"(first difference: header, dtype: "float16" | "f\x7f")");
}

TEST_F(LogDiff, ALimitedLogIsComparedFromItsFirstIterationOn) {
  const OrderLogLimits limits{.keeps = LogKeeps::full, .size = kMinLogSize};
  const LogDiffReport equal = diff(logged_run(400), logged_run(400, true), limits);
  EXPECT_FALSE(equal.difference) << to_text(equal, options_);
  ASSERT_TRUE(equal.from);
  EXPECT_EQ(equal.iterations, 400 - *equal.from + 1);
  LoggedRun changed = logged_run(400);
  nth<messages::IterationDoneT>(changed, 395).results[0]->token = 9;
  const LogDiffReport different = diff(logged_run(400), changed, limits);
  ASSERT_TRUE(different.difference);
  EXPECT_EQ(different.difference->where, "iteration 396, results");
}

TEST_F(LogDiff, OfALogOfTablesOnlyTheseAreCompared) {
  const OrderLogLimits tables{.keeps = LogKeeps::tables, .size = {}};
  const LogDiffReport equal = diff(logged_run(4), logged_run(4), tables);
  EXPECT_FALSE(equal.difference) << to_text(equal, options_);
  EXPECT_EQ(equal.records, 2u + 4 * 2);
  EXPECT_THAT(to_text(equal, options_), HasSubstr("--orders-log tables"));
}

TEST_F(LogDiff, LogsWithoutACommonIterationCannotBeCompared) {
  const OrderLogLimits limits{.keeps = LogKeeps::full, .size = kMinLogSize};
  EXPECT_THROW(diff(logged_run(4), logged_run(400), limits), Failure);
}

}  // namespace
}  // namespace poise
