#include "common/files/order_log_segments.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/order_log.h"
#include "common/trouble.h"

namespace poise {
namespace {

using SegmentMessages = std::vector<std::vector<std::byte>>;

template <typename Table>
std::vector<std::byte> message_of(Table&& table) {
  messages::MessageT message;
  message.run_id = "run";
  message.body.Set(std::forward<Table>(table));
  flatbuffers::FlatBufferBuilder builder;
  messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
  const auto* bytes = reinterpret_cast<const std::byte*>(builder.GetBufferPointer());
  return {bytes, bytes + builder.GetSize()};
}

SegmentMessages configuration(std::int32_t resident_layers) {
  messages::PoolGrantT pool;
  pool.act_blocks = 3;
  messages::ConfigureT configure;
  configure.resident_layers = resident_layers;
  messages::ReadyT ready;
  ready.credits = 2;
  return {message_of(std::move(pool)), message_of(std::move(configure)),
          message_of(std::move(ready))};
}

// Tables of about 2 KiB, an order, a report, results.
SegmentMessages iteration(std::uint64_t number) {
  messages::IterationT tables;
  tables.iteration = number;
  tables.mini_batches.push_back(std::make_unique<messages::MiniBatchT>());
  tables.mini_batches.back()->tokens.assign(500, static_cast<std::int32_t>(number));
  messages::LayerOrderT order;
  order.iteration = number;
  messages::LayerDoneT report;
  report.iteration = number;
  messages::IterationDoneT results;
  results.iteration = number;
  return {message_of(std::move(tables)), message_of(std::move(order)),
          message_of(std::move(report)), message_of(std::move(results))};
}

class OrderLogSegments : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "poise-segments-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    log_ = folder_ / "orders.log";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Appends a Configure, if wanted, and iterations [first, last].
  void write(std::uint64_t first, std::uint64_t last, const OrderLogLimits& limits,
             bool configures = true) {
    OrderLog log(log_, "{}", limits);
    const auto append = [&](const SegmentMessages& messages) {
      for (const auto& message : messages) {
        log.append(message);
        written_.push_back(message);
      }
    };
    if (configures) {
      append(configuration(static_cast<std::int32_t>(first)));
    }
    for (std::uint64_t number = first; number <= last; ++number) {
      append(iteration(number));
    }
  }
  SegmentMessages read() const {
    SegmentMessages messages;
    OrderLogReader reader(log_);
    while (auto record = reader.next()) {
      EXPECT_EQ(record->number, messages.size());
      messages.push_back(std::move(record->bytes));
    }
    EXPECT_EQ(reader.torn_tail().n, 0);
    return messages;
  }
  LogExtent extent() const { return OrderLogReader(log_).extent(); }
  std::uint64_t bytes() const {
    std::uint64_t all = 0;
    for (const auto& file : segment_files(log_)) {
      all += std::filesystem::file_size(file);
    }
    return all;
  }
  static messages::Body kind_of(const std::vector<std::byte>& message) {
    return messages::GetMessage(message.data())->body_type();
  }
  static std::vector<std::uint64_t> iterations_in(const SegmentMessages& messages) {
    std::vector<std::uint64_t> numbers;
    for (const auto& message : messages) {
      if (const auto* tables = messages::GetMessage(message.data())->body_as_Iteration()) {
        numbers.push_back(tables->iteration());
      }
    }
    return numbers;
  }

  std::filesystem::path folder_, log_;
  SegmentMessages written_;
};

constexpr OrderLogLimits kLimited{.keeps = LogKeeps::full, .size = kMinLogSize};
constexpr OrderLogLimits kTables{.keeps = LogKeeps::tables, .size = {}};
constexpr OrderLogLimits kOff{.keeps = LogKeeps::off, .size = {}};

TEST_F(OrderLogSegments, WithoutALimitThereIsOneFileOfTheFormatThatStoodBefore) {
  write(1, 300, {});
  EXPECT_EQ(segment_files(log_), std::vector{log_});
  EXPECT_EQ(OrderLogReader(log_).header_json(), "{}");
  EXPECT_EQ(read(), written_);
}

TEST_F(OrderLogSegments, ALimitedLogKeepsItsNewestIterationsAndWhatIsInForce) {
  write(1, 300, kLimited);
  EXPECT_LE(bytes(), static_cast<std::uint64_t>(kMinLogSize.n) + 8192);
  EXPECT_GE(bytes(), static_cast<std::uint64_t>(kMinLogSize.n) / 2);
  const auto kept = read();
  const auto numbers = iterations_in(kept);
  ASSERT_GT(numbers.size(), 15u);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    EXPECT_EQ(numbers[i], 300 - numbers.size() + 1 + i);
  }
  EXPECT_EQ(SegmentMessages(kept.begin(), kept.begin() + 3), configuration(1));
  EXPECT_EQ(SegmentMessages(kept.begin() + 3, kept.end()),
            SegmentMessages(written_.end() - static_cast<std::ptrdiff_t>(kept.size()) + 3,
                            written_.end()));
  EXPECT_TRUE(extent().begins_late());
  EXPECT_FALSE(std::filesystem::exists(log_));
}

TEST_F(OrderLogSegments, EachRecordIsReadOnceThoughSegmentsBeginWithCopies) {
  write(1, 100, {.keeps = LogKeeps::full, .size = kMiB});
  EXPECT_GT(extent().segments, 1u);
  EXPECT_FALSE(extent().begins_late());
  EXPECT_EQ(read(), written_);
}

TEST_F(OrderLogSegments, TimeGoesOnThroughSegments) {
  write(1, 100, {.keeps = LogKeeps::full, .size = kMiB});
  write(101, 200, {.keeps = LogKeeps::full, .size = kMiB});
  OrderLogReader reader(log_);
  std::uint64_t before = 0;
  while (const auto record = reader.next()) {
    EXPECT_GE(record->time_ns, before);
    before = record->time_ns;
  }
}

TEST_F(OrderLogSegments, ALaterPlannerGoesOnWithTheLastSegmentAndItsLimit) {
  write(1, 18, kLimited);
  const auto before = segment_files(log_);
  write(19, 19, kLimited);
  EXPECT_EQ(segment_files(log_), before);
  write(20, 300, kLimited, false);
  EXPECT_LE(bytes(), static_cast<std::uint64_t>(kMinLogSize.n) + 8192);
  const auto kept = read();
  EXPECT_EQ(SegmentMessages(kept.begin(), kept.begin() + 3), configuration(19));
}

TEST_F(OrderLogSegments, ALimitThatIsNewAppliesToWhatIsThere) {
  write(1, 300, {});
  write(301, 301, kLimited, false);
  EXPECT_LE(bytes(), static_cast<std::uint64_t>(kMinLogSize.n));
  EXPECT_EQ(iterations_in(read()), std::vector<std::uint64_t>{301});
}

TEST_F(OrderLogSegments, TablesLeaveOutOrdersOfLayersAndReports) {
  write(1, 10, kTables);
  for (const auto& message : read()) {
    EXPECT_NE(kind_of(message), messages::Body::LayerOrder);
    EXPECT_NE(kind_of(message), messages::Body::LayerDone);
  }
  EXPECT_EQ(read().size(), 3u + 2 * 10);
  EXPECT_TRUE(extent().thin);
}

TEST_F(OrderLogSegments, AnotherChoiceOfWhatIsKeptBeginsASegment) {
  write(1, 10, {});
  write(11, 20, kTables);
  EXPECT_EQ(extent().segments, 2u);
  EXPECT_TRUE(extent().thin);
  EXPECT_EQ(iterations_in(read()).size(), 20u);
  write(21, 30, {});
  EXPECT_EQ(extent().segments, 3u);
  EXPECT_FALSE(extent().begins_late());
}

TEST_F(OrderLogSegments, ATimeWithoutALogIsAGap) {
  write(1, 10, {});
  write(11, 20, kOff);
  EXPECT_TRUE(extent().ends_early);
  EXPECT_EQ(iterations_in(read()).back(), 10u);
  write(21, 30, {});
  EXPECT_TRUE(extent().begins_late());
  EXPECT_EQ(iterations_in(read()).front(), 21u);
  EXPECT_FALSE(extent().ends_early);
}

TEST_F(OrderLogSegments, AReaderKnowsWhyTheBeginningIsMissing) {
  write(1, 300, kLimited);
  EXPECT_EQ(extent().gap, LogGap::removed);
  remove_log(log_);
  write(1, 10, {});
  write(11, 20, kOff);
  write(21, 30, {});
  EXPECT_EQ(extent().gap, LogGap::off);
}

TEST_F(OrderLogSegments, ALogThatKeepsNothingIsRefusedWithItsReason) {
  write(1, 10, kOff);
  write(11, 20, kOff);
  EXPECT_EQ(segment_files(log_).size(), 1u);
  try {
    OrderLogReader reader(log_);
    FAIL() << "it was read";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("--orders-log off"), std::string::npos);
  }
}

TEST_F(OrderLogSegments, ATornTailIsCutBeforeTheNextSegmentBegins) {
  write(1, 10, {});
  std::filesystem::resize_file(log_, std::filesystem::file_size(log_) - 5);
  written_.pop_back();
  write(11, 20, kTables);
  EXPECT_EQ(iterations_in(read()).size(), 20u);
}

TEST_F(OrderLogSegments, ATornTailBeforeAnotherSegmentIsDamage) {
  write(1, 10, {});
  write(11, 20, kTables);
  std::filesystem::resize_file(log_, std::filesystem::file_size(log_) - 5);
  EXPECT_THROW(read(), Failure);
}

TEST_F(OrderLogSegments, WithoutAMiddleSegmentTheLaterOnesAreRead) {
  write(1, 10, {});
  write(11, 20, kTables);
  write(21, 30, {});
  std::filesystem::remove(segment_file(log_, 2));
  EXPECT_EQ(extent().first_segment, 3u);
  EXPECT_EQ(iterations_in(read()).front(), 21u);
}

TEST_F(OrderLogSegments, BehindDamageTheBeginningIsKnownToBeMissing) {
  { OrderLog log(log_, "{}", {}, true); }
  EXPECT_TRUE(std::filesystem::exists(log_));
  EXPECT_TRUE(extent().begins_late());
  EXPECT_EQ(extent().gap, LogGap::damage);
  write(1, 10, {});
  write(11, 20, kTables);
  EXPECT_EQ(extent().gap, LogGap::damage);
  EXPECT_EQ(extent().segments, 2u);
}

TEST_F(OrderLogSegments, BehindADamagedLaterSegmentTheFirstOneIsAGapToo) {
  write(1, 10, {});
  { OrderLog log(log_, "{}", {}, true); }
  EXPECT_EQ(extent().first_segment, 3u);
  EXPECT_EQ(extent().gap, LogGap::damage);
}

TEST_F(OrderLogSegments, ASegmentWithoutAHeaderIsLeftOutAndReplaced) {
  write(1, 10, {});
  std::ofstream(segment_file(log_, 2)).flush();
  EXPECT_EQ(read(), written_);
  write(11, 20, {});
  EXPECT_EQ(segment_files(log_), std::vector{log_});
  EXPECT_EQ(read(), written_);
}

TEST_F(OrderLogSegments, OneSegmentIsReadAloneByItsName) {
  write(1, 300, kLimited);
  const auto files = segment_files(log_);
  OrderLogReader reader(files[1]);
  EXPECT_EQ(reader.extent().segments, 1u);
  EXPECT_TRUE(reader.extent().begins_late());
  const auto first = reader.next();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->bytes, configuration(1)[0]);
}

TEST_F(OrderLogSegments, AHeaderThatNamesUnknownThingsIsRefused) {
  for (const char* header :
       {R"({"keeps":"some"})", R"({"segment":0})", R"({"carried":-1})", "[]"}) {
    EXPECT_THROW(segment_of(header, "a header"), Failure) << header;
  }
}

TEST_F(OrderLogSegments, ALogIsRemovedWithAllItsSegmentsAndNothingElse) {
  write(1, 300, kLimited);
  for (const char* other :
       {"orders.log.damaged", "orders.log.07", "orders.log.2x", "profile-orders.log"}) {
    std::ofstream(folder_ / other) << "x";
  }
  remove_log(log_);
  EXPECT_TRUE(segment_files(log_).empty());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 4);
}

}  // namespace
}  // namespace poise
