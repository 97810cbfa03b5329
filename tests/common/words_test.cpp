#include "common/words.h"

#include <gtest/gtest.h>

namespace poise {
namespace {

TEST(Words, OneIsNotMany) {
  EXPECT_EQ(counted(0, "request"), "0 requests");
  EXPECT_EQ(counted(1, "request"), "1 request");
  EXPECT_EQ(counted(2, "KV block"), "2 KV blocks");
  EXPECT_EQ(counted(3, "mini-batch"), "3 mini-batches");
  EXPECT_EQ(counted(1, "entry"), "1 entry");
  EXPECT_EQ(counted(2, "entry"), "2 entries");
}

TEST(Words, ASizeIsInTheLargestUnitOfWhichThereIsOne) {
  EXPECT_EQ(size_text(Bytes{0}), "0 bytes");
  EXPECT_EQ(size_text(Bytes{1}), "1 byte");
  EXPECT_EQ(size_text(kKiB - Bytes{1}), "1023 bytes");
  EXPECT_EQ(size_text(kKiB), "1.0 KiB");
  EXPECT_EQ(size_text(kMiB * 2 + kKiB * 512), "2.5 MiB");
  EXPECT_EQ(size_text(kGiB * 24), "24.0 GiB");
  EXPECT_EQ(size_text(kGiB * 1536), "1.5 TiB");
}

}  // namespace
}  // namespace poise
