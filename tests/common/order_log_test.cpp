#include "common/order_log.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "common/trouble.h"

namespace poise {
namespace {

namespace fs = std::filesystem;

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void spill(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// What a reader gets: the payloads, whether the rest was torn, or that the log is damaged.
struct Reading {
  std::vector<std::string> payloads;
  std::int64_t torn = 0;
  bool damaged = false;
};

Reading read_all(const fs::path& path) {
  Reading reading;
  try {
    OrderLogReader reader(path);
    while (auto record = reader.next()) {
      EXPECT_EQ(record->number, reading.payloads.size());
      reading.payloads.push_back(text_of(record->bytes));
    }
    reading.torn = reader.torn_tail().n;
  } catch (const Failure&) {
    reading.damaged = true;
  }
  return reading;
}

class OrderLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "poise-order-log-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    log_ = folder_ / "orders.log";
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const std::vector<std::string>& payloads) {
    OrderLog log(log_, R"({"run":"1"})");
    for (const auto& payload : payloads) {
      log.append(bytes_of(payload));
    }
  }

  fs::path folder_, log_;
};

const std::vector<std::string> kPayloads{"one", "twotwo", std::string(100, 'x'), "four"};

TEST_F(OrderLogTest, WhatWasAppendedIsReadInOrder) {
  write(kPayloads);
  EXPECT_EQ(read_all(log_).payloads, kPayloads);
  EXPECT_EQ(read_all(log_).torn, 0);
  EXPECT_EQ(OrderLogReader(log_).header_json(), R"({"run":"1"})");
}

TEST_F(OrderLogTest, HeldRecordsAreWrittenOnceTheLogBegins) {
  {
    const auto log = OrderLog::held(R"({"run":"1"})", {});
    log->append(bytes_of("one"));
    log->flush();
    EXPECT_TRUE(fs::is_empty(folder_));
    log->begin(log_);
    log->append(bytes_of("two"));
  }
  EXPECT_EQ(read_all(log_).payloads, (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(OrderLogReader(log_).header_json(), R"({"run":"1"})");
  write({"three"});
  EXPECT_EQ(read_all(log_).payloads, (std::vector<std::string>{"one", "two", "three"}));
}

TEST_F(OrderLogTest, HeldRecordsThatNeverBeginLeaveNoFile) {
  {
    const auto log = OrderLog::held(R"({"run":"1"})", {});
    log->append(bytes_of("one"));
  }
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(OrderLogTest, OnlyThisUserMayReadIt) {
  write({});
  struct stat status {};
  ASSERT_EQ(stat(log_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0600u);
}

TEST_F(OrderLogTest, ALogCutAnywhereGivesItsWholeRecordsAndSaysWhatIsTorn) {
  write(kPayloads);
  const std::string whole = slurp(log_);
  std::size_t header = 16 + std::strlen(R"({"run":"1"})");
  for (std::size_t cut = header; cut < whole.size(); ++cut) {
    spill(log_, whole.substr(0, cut));
    const Reading reading = read_all(log_);
    ASSERT_FALSE(reading.damaged) << "cut at " << cut;
    ASSERT_LT(reading.payloads.size(), kPayloads.size()) << "cut at " << cut;
    for (std::size_t i = 0; i < reading.payloads.size(); ++i) {
      ASSERT_EQ(reading.payloads[i], kPayloads[i]) << "cut at " << cut;
    }
  }
}

TEST_F(OrderLogTest, AnyFlippedBitBeforeTheLastRecordIsDamage) {
  write(kPayloads);
  const std::string whole = slurp(log_);
  const std::size_t header = 16 + std::strlen(R"({"run":"1"})");
  const std::size_t last_record = whole.size() - (24 + 8);
  for (std::size_t at = header; at < last_record; ++at) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
    spill(log_, flipped);
    ASSERT_TRUE(read_all(log_).damaged) << "flipped byte " << at;
  }
}

TEST_F(OrderLogTest, ALogGoesOnBehindItsLastWholeRecord) {
  write(kPayloads);
  fs::resize_file(log_, fs::file_size(log_) - 3);
  write({"five"});
  EXPECT_EQ(read_all(log_).payloads,
            (std::vector<std::string>{kPayloads[0], kPayloads[1], kPayloads[2], "five"}));
}

// As a power loss leaves it: the file has its new size, and no bytes behind its last record.
TEST_F(OrderLogTest, ATailOfNulsIsTornOffWhateverItsLength) {
  write(kPayloads);
  const std::string whole = slurp(log_);
  for (const std::size_t nuls : {1, 23, 24, 25, 100, 5000, (2 << 20) + 7}) {
    SCOPED_TRACE(nuls);
    spill(log_, whole + std::string(nuls, '\0'));
    const Reading reading = read_all(log_);
    EXPECT_FALSE(reading.damaged);
    EXPECT_EQ(reading.payloads, kPayloads);
    EXPECT_EQ(reading.torn, static_cast<std::int64_t>(nuls));
  }
}

// As before, where a part of the last record came to the disk.
TEST_F(OrderLogTest, ARecordThatEndsInATailOfNulsIsTornOff) {
  write(kPayloads);
  const std::string whole = slurp(log_);
  const std::size_t last_record = whole.size() - (24 + 8);
  const std::vector<std::string> others(kPayloads.begin(), kPayloads.end() - 1);
  for (std::size_t cut = last_record; cut < whole.size(); ++cut) {
    spill(log_, whole.substr(0, cut) + std::string(5000, '\0'));
    const Reading reading = read_all(log_);
    ASSERT_FALSE(reading.damaged) << "cut at " << cut;
    if (reading.payloads != kPayloads) {  // padding may be cut
      ASSERT_EQ(reading.payloads, others) << "cut at " << cut;
      ASSERT_EQ(reading.torn, static_cast<std::int64_t>(cut - last_record + 5000));
    }
  }
  std::string flipped = whole + std::string(5000, '\0');
  flipped[last_record - 16] ^= 0x10;
  spill(log_, flipped);
  EXPECT_TRUE(read_all(log_).damaged) << "of the record before";
}

TEST_F(OrderLogTest, ASegmentOfNothingButNulsHasYetToBegin) {
  write(kPayloads);
  spill(segment_file(log_, 2), std::string(5000, '\0'));
  EXPECT_EQ(read_all(log_).payloads, kPayloads);
  write({"five"});
  std::vector<std::string> all = kPayloads;
  all.push_back("five");
  EXPECT_EQ(read_all(log_).payloads, all);
}

TEST_F(OrderLogTest, NulsBeforeAnyOtherByteAreDamage) {
  write(kPayloads);
  const std::string whole = slurp(log_);
  const std::string record = whole.substr(16 + std::strlen(R"({"run":"1"})"), 24 + 8);
  for (const std::size_t nuls : {24, 100, 2 << 20}) {
    SCOPED_TRACE(nuls);
    for (const std::string& behind : {std::string("x"), record}) {
      spill(log_, whole + std::string(nuls, '\0') + behind);
      EXPECT_TRUE(read_all(log_).damaged);
    }
  }
}

TEST_F(OrderLogTest, ALogGoesOnInPlaceOfATailOfNuls) {
  write(kPayloads);
  const std::string whole = slurp(log_);
  spill(log_, whole + std::string(5000, '\0'));
  write({"five"});
  std::vector<std::string> all = kPayloads;
  all.push_back("five");
  EXPECT_EQ(read_all(log_).payloads, all);
  EXPECT_EQ(fs::file_size(log_), whole.size() + 24 + 8);
}

TEST_F(OrderLogTest, TimeGoesOnInAContinuedLog) {
  write({"one"});
  write({"two"});
  OrderLogReader reader(log_);
  const auto first = reader.next();
  const auto second = reader.next();
  ASSERT_TRUE(first && second);
  EXPECT_GT(second->time_ns, first->time_ns);
}

TEST_F(OrderLogTest, OtherFilesAreRefused) {
  EXPECT_THROW(OrderLogReader(folder_ / "none"), Failure);
  EXPECT_THROW(OrderLogReader reader(folder_), Failure);
  spill(log_, "");
  EXPECT_THROW(OrderLogReader reader(log_), Failure);
  spill(log_, "{\"custom_id\": 1}\n{\"custom_id\": 2}\n");
  EXPECT_THROW(OrderLogReader reader(log_), Failure);
}

TEST(Crc32c, IsTheCastagnoliSumInOneGoOrInParts) {
  const auto text = bytes_of("123456789");
  EXPECT_EQ(crc32c(text), 0xe3069283u);
  const std::span<const std::byte> span(text);
  EXPECT_EQ(crc32c(span.subspan(4), crc32c(span.first(4))), 0xe3069283u);
}

}  // namespace
}  // namespace poise
