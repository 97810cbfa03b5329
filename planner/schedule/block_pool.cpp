#include "planner/schedule/block_pool.h"

#include <algorithm>
#include <bit>

#include "common/trouble.h"

namespace poise {
namespace {

std::size_t word_of(std::uint32_t number) { return number / 64; }
std::uint64_t bit_of(std::uint32_t number) { return std::uint64_t{1} << (number % 64); }

// The bits of word `word` whose numbers are below `limit`.
std::uint64_t bits_below(std::uint32_t limit, std::size_t word) {
  const std::uint64_t first = 64 * static_cast<std::uint64_t>(word);
  if (limit <= first) {
    return 0;
  }
  const std::uint64_t count = limit - first;
  return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

}  // namespace

BlockPool::BlockPool(std::uint32_t limit) { set_limit(limit); }

std::optional<BlockId> BlockPool::take() {
  if (free_ == 0) {
    return std::nullopt;
  }
  while (free_bits_[lowest_word_] == 0) {
    ++lowest_word_;
  }
  std::uint64_t& bits = free_bits_[lowest_word_];
  const auto number = static_cast<std::uint32_t>(64 * lowest_word_ +
                                                 static_cast<std::size_t>(std::countr_zero(bits)));
  bits &= bits - 1;
  --free_;
  return BlockId{number};
}

bool BlockPool::take(BlockId id) {
  if (id.n >= limit_ || (free_bits_[word_of(id.n)] & bit_of(id.n)) == 0) {
    return false;
  }
  free_bits_[word_of(id.n)] &= ~bit_of(id.n);
  --free_;
  return true;
}

bool BlockPool::is_taken(BlockId id) const {
  return id.n < limit_ && (free_bits_[word_of(id.n)] & bit_of(id.n)) == 0;
}

void BlockPool::give_back(BlockId id) {
  check(is_taken(id), "only a taken block is given back");
  free_bits_[word_of(id.n)] |= bit_of(id.n);
  lowest_word_ = std::min(lowest_word_, word_of(id.n));
  ++free_;
}

bool BlockPool::set_limit(std::uint32_t limit) {
  for (std::size_t word = word_of(limit); word < free_bits_.size(); ++word) {
    const std::uint64_t gone = bits_below(limit_, word) & ~bits_below(limit, word);
    if ((free_bits_[word] & gone) != gone) {
      return false;
    }
  }
  const std::size_t words = static_cast<std::size_t>(ceil_div(limit, 64));
  const std::size_t first = std::min(word_of(limit), word_of(limit_));
  free_bits_.resize(words, 0);
  for (std::size_t word = first; word < words; ++word) {
    const std::uint64_t fresh = bits_below(limit, word) & ~bits_below(limit_, word);
    free_bits_[word] = (free_bits_[word] | fresh) & bits_below(limit, word);
  }
  free_ = limit > limit_ ? free_ + (limit - limit_) : free_ - (limit_ - limit);
  lowest_word_ = std::min(lowest_word_, first);
  limit_ = limit;
  return true;
}

std::uint32_t BlockPool::least_limit() const {
  for (std::size_t word = free_bits_.size(); word-- > 0;) {
    const std::uint64_t taken = bits_below(limit_, word) & ~free_bits_[word];
    if (taken != 0) {
      return static_cast<std::uint32_t>(64 * word +
                                        static_cast<std::size_t>(std::bit_width(taken)));
    }
  }
  return 0;
}

}  // namespace poise
