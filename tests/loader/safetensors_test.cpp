#include "loader/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <functional>
#include <random>

#include "common/files/json.h"
#include "common/trouble.h"
#include "tests/support/complaint.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using ::testing::HasSubstr;
using testing_support::complaint;
using testing_support::file_tensor;
using testing_support::safetensors_bytes;
using testing_support::safetensors_header;
using testing_support::safetensors_with_header;
using testing_support::TempDirectory;
using testing_support::write_file;

// What is said of a header over `data_bytes` bytes of tensors.
std::string said_of(const std::string& header, std::uint64_t data_bytes) {
  return complaint([&] { parse_safetensors_header(header, 8, 8 + data_bytes, "a.safetensors"); });
}

std::vector<StoredTensor> parse(const std::string& header, std::uint64_t data_bytes) {
  return parse_safetensors_header(header, 8, 8 + data_bytes, "a.safetensors");
}

TEST(Safetensors, TensorsComeInTheOrderOfTheirBytes) {
  const auto tensors = parse(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]},
          "b":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}   )",
      32);
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].name, "b");
  EXPECT_EQ(tensors[0].dtype, "BF16");
  EXPECT_EQ(tensors[0].begin, 8u);
  EXPECT_EQ(tensors[1].name, "a");
  EXPECT_EQ(tensors[1].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(tensors[1].begin, 16u);
  EXPECT_EQ(tensors[1].bytes, Bytes{24});
}

TEST(Safetensors, AFileWithoutTensorsAndAScalarAndAnEmptyTensorAreSound) {
  EXPECT_TRUE(parse("{}", 0).empty());
  EXPECT_EQ(parse(R"({"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]}})", 8).size(), 1u);
  EXPECT_EQ(parse(R"({"e":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},
                      "f":{"dtype":"I8","shape":[3],"data_offsets":[0,3]},
                      "g":{"dtype":"F4","shape":[4],"data_offsets":[3,5]}})",
                  5)
                .size(),
            3u);
}

TEST(Safetensors, AHeaderThatBreaksARuleIsRefusedInOneSentenceThatNamesTheTensor) {
  struct Row {
    std::string header;
    std::uint64_t data_bytes;
    std::string says;
  };
  const auto with = [](const std::string& fields) { return "{\"t\":{" + fields + "}}"; };
  const std::vector<Row> table{
      {"", 0, "does not begin with {"},
      {" {}", 0, "does not begin with {"},
      {"\xef\xbb\xbf{}", 0, "does not begin with {"},
      {"[]", 0, "does not begin with {"},
      {"{} \n", 0, "does not end with }"},
      {"{}x", 0, "does not end with }"},
      {"{}{}", 0, "not valid JSON"},
      {"{\"t\":", 0, "does not end with }"},
      {"{\"t\xff\":1}", 0, "ill-formed UTF-8"},
      {"{\"t\":1}", 0, "tensor t must be described by an object, not 1"},
      {"{\"t\":[]}", 0, "tensor t must be described by an object, not a list"},
      {"{\"__metadata__\":[]}", 0, "\"__metadata__\" must be an object"},
      {"{\"__metadata__\":{\"a\":1}}", 0, "\"__metadata__\" must hold strings, but \"a\" is 1"},
      {"{\"__metadata__\":{\"a\":{\"b\":{}}}}", 0, "more than 3 deep"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "\"__metadata__\" appears twice"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
           "t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
       4, "\"t\" appears twice"},
      {with(R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])"), 4,
       "\"dtype\" appears twice"},
      {with(R"("shape":[1],"data_offsets":[0,4])"), 4, "tensor t has no \"dtype\""},
      {with(R"("dtype":"F32","data_offsets":[0,4])"), 4, "tensor t has no \"shape\""},
      {with(R"("dtype":"F32","shape":[1])"), 4, "tensor t has no \"data_offsets\""},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1)"), 4, "unknown field \"x\""},
      {with(R"("dtype":32,"shape":[1],"data_offsets":[0,4])"), 4, "\"dtype\" that is no string"},
      {with(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])"), 4, "unknown dtype \"F33\""},
      {with(R"("dtype":"f32","shape":[1],"data_offsets":[0,4])"), 4, "unknown dtype \"f32\""},
      {with(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"), 4, "no list of at most 8 sizes"},
      {with(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4])"), 4,
       "no list of at most 8 sizes"},
      {with(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4, "has -1 in \"shape\""},
      {with(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), 4, "has 1.0 in \"shape\""},
      {with(R"("dtype":"F32","shape":[1e0],"data_offsets":[0,4])"), 4, "has 1.0 in \"shape\""},
      {with(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])"), 4, "has \"1\" in \"shape\""},
      {with(R"("dtype":"F32","shape":[true],"data_offsets":[0,4])"), 4, "has true in \"shape\""},
      {with(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])"), 0,
       "does not take the 0 bytes"},
      {with(R"("dtype":"F32","shape":[2147483648,2147483648,4],"data_offsets":[0,0])"), 0,
       "does not take the 0 bytes"},
      {with(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"), 4,
       "has 18446744073709551615 in \"shape\""},
      {with(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), 4,
       "of shape [2] and dtype F32 does not take the 4 bytes given to it"},
      {with(R"("dtype":"F16","shape":[2],"data_offsets":[0,8])"), 8,
       "dtype F16 does not take the 8 bytes"},
      {with(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), 2, "does not take the 2 bytes"},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":4)"), 4, "no list of two numbers"},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])"), 8, "no list of two numbers"},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), 4, "run backwards: 4 to 0"},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])"), 4, "has -4 in \"data_offsets\""},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":[0.0,4.0])"), 4, "in \"data_offsets\""},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":["0","4"])"), 4, "in \"data_offsets\""},
      {with(R"("dtype":"U8","shape":[4611686018427387904],
               "data_offsets":[0,4611686018427387904])"),
       4, "has 4611686018427387904 in \"shape\""},
      {with(R"("dtype":"U8","shape":[1000],"data_offsets":[0,1000])"), 4, "is cut short"},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), 8, "leaves a hole before it"},
      {with(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 6,
       "2 bytes after its last tensor where none should be"},
      {R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
           "u":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       8, "tensor u overlaps the one before it"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
           "u":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
       4, "overlaps the one before it"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
           "u":{"dtype":"F32","shape":[1],"data_offsets":[5,9]}})",
       9, "tensor u leaves a hole before it"},
      {"{}", 1, "1 byte after its last tensor where none should be"},
      {R"({"a\nb":{"dtype":"F32"}})", 0, "tensor a\\x0ab has no"},
  };
  for (const Row& row : table) {
    const std::string sentence = said_of(row.header, row.data_bytes);
    EXPECT_THAT(sentence, HasSubstr(row.says)) << row.header;
    EXPECT_THAT(sentence, ::testing::StartsWith("a.safetensors")) << row.header;
    EXPECT_EQ(sentence.find('\n'), std::string::npos) << sentence;
  }
}

TEST(Safetensors, ManyTensorsAreBoundedBeforeTheyTakeMemory) {
  std::string header = "{";
  for (int i = 0; i < 70'000; ++i) {
    header += fmt::format(R"("{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}},)", i);
  }
  header.back() = '}';
  EXPECT_THAT(said_of(header, 0), HasSubstr("more than 425984 values"));
}

class SafetensorsOnDisk : public ::testing::Test {
 protected:
  std::string said_of_file(const std::string& bytes) {
    write_file(path_, bytes);
    return complaint([&] { SafetensorsFile{path_}; });
  }

  TempDirectory directory_;
  std::filesystem::path path_ = directory_.path() / "model.safetensors";
};

TEST_F(SafetensorsOnDisk, AFileIsReadAsItWasWritten) {
  write_file(path_, safetensors_bytes({file_tensor("a", DType::float32, {2}, {1, 2}),
                                       file_tensor("b", DType::float16, {1}, {3})}));
  const SafetensorsFile file(path_);
  ASSERT_EQ(file.tensors().size(), 2u);
  float value = 0;
  file.file().read_exactly(file.tensors()[0].begin + 4,
                           std::as_writable_bytes(std::span(&value, 1)));
  EXPECT_EQ(value, 2);
}

TEST_F(SafetensorsOnDisk, ALengthThatCannotBeIsRefused) {
  const auto with_length = [](std::uint64_t length, const std::string& rest) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return bytes + rest;
  };
  EXPECT_THAT(said_of_file(""), HasSubstr("0 bytes are no safetensors file"));
  EXPECT_THAT(said_of_file("1"), HasSubstr("1 byte is no safetensors file"));
  EXPECT_THAT(said_of_file("1234567"), HasSubstr("7 bytes are no safetensors file"));
  EXPECT_THAT(said_of_file(with_length(0, "")), HasSubstr("does not begin with {"));
  EXPECT_THAT(said_of_file(with_length(1, "{")), HasSubstr("does not end with }"));
  EXPECT_THAT(said_of_file(with_length(3, "{}")), HasSubstr("cut short"));
  EXPECT_THAT(said_of_file(with_length(100'000'000, "{}")), HasSubstr("cut short"));
  EXPECT_THAT(said_of_file(with_length(100'000'001, "{}")), HasSubstr("at most 100000000"));
  EXPECT_THAT(said_of_file(with_length(1ull << 63, "{}")), HasSubstr("at most 100000000"));
  EXPECT_THAT(said_of_file(with_length(~0ull, "{}")), HasSubstr("at most 100000000"));
}

TEST_F(SafetensorsOnDisk, OnlyRegularFilesAreOpened) {
  EXPECT_THAT(complaint([&] { SafetensorsFile{path_}; }), HasSubstr("is not there"));
  std::filesystem::create_directory(path_);
  EXPECT_THAT(complaint([&] { SafetensorsFile{path_}; }), HasSubstr("is a directory"));
  std::filesystem::remove(path_);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(complaint([&] { SafetensorsFile{path_}; }), HasSubstr("is a pipe"));
}

TEST_F(SafetensorsOnDisk, AFileCutShortOrWrittenToWhileItIsReadIsNoticed) {
  write_file(path_, safetensors_bytes({file_tensor("a", DType::float32, {2}, {1, 2})}));
  const SafetensorsFile file(path_);
  file.file().check_unchanged();
  std::filesystem::resize_file(path_, 20);
  EXPECT_THAT(complaint([&] { file.file().check_unchanged(); }),
              HasSubstr("was changed while it was read"));
  float value = 0;
  EXPECT_THAT(complaint([&] {
                file.file().read_exactly(file.tensors()[0].begin,
                                         std::as_writable_bytes(std::span(&value, 1)));
              }),
              HasSubstr("ends at byte"));
}

// However a sound header is damaged, it is refused in one line, or what is read of it covers the
// file exactly: the sum of checks no damage gets around.
TEST(Safetensors, RandomDamageNeverGetsPastTheRules) {
  const auto seed = static_cast<unsigned>(::testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::string sound =
      safetensors_header({file_tensor("model.a", DType::float32, {2, 2}, {1, 2, 3, 4}),
                          file_tensor("model.b", DType::float16, {3}, {1, 2, 3}),
                          file_tensor("c", DType::bfloat16, {0}, {})});
  constexpr std::string_view kTokens = "0123456789,:{}[]\"-.e F";
  int read = 0;
  for (int i = 0; i < 8'000; ++i) {
    std::string header = sound;
    for (std::uint32_t change = random() % 3; change < 3; ++change) {
      const std::size_t at = random() % header.size();
      switch (random() % 4) {
        case 0:
          header[at] = kTokens[random() % kTokens.size()];
          break;
        case 1:
          header[at] = static_cast<char>(random());
          break;
        case 2:
          header.erase(at, 1 + random() % 8);
          break;
        default:
          header.insert(at, header.substr(random() % header.size(), random() % 40));
      }
      header += ' ';
    }
    try {
      std::uint64_t covered = 8;
      for (const StoredTensor& tensor : parse(header, 22)) {
        ASSERT_EQ(tensor.begin, covered);
        ASSERT_GE(tensor.bytes.n, 0);
        covered += static_cast<std::uint64_t>(tensor.bytes.n);
      }
      ASSERT_EQ(covered, 8u + 22u);
      ++read;
    } catch (const Failure& failure) {
      ASSERT_EQ(std::string_view(failure.what()).find('\n'), std::string_view::npos);
      ASSERT_LT(std::strlen(failure.what()), 700u);
    }
  }
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace poise
