#include "planner/record/check/log_check_batch.h"

#include <fmt/core.h>

#include <algorithm>
#include <set>

namespace poise {
namespace {

constexpr std::int64_t kNoBound = INT64_MAX;  // the log does not tell it

// Of the KV buffer (0) or the ACT buffer (1), those that a block of the place may have: KV blocks of the
// device have some without memory, too.
std::uint32_t slots_in(int buffer, messages::Place place, const messages::ConfigureT& configure) {
  const std::int64_t here = place == messages::Place::Gpu ? configure.gpu_kv_blocks : 0;
  return static_cast<std::uint32_t>(buffer == 0 ? configure.kv_slots + here : configure.act_slots);
}

// How many blocks of the kind there are.
std::int64_t blocks_in_pool(const messages::ConfigureT& configure,
                            const std::optional<messages::PoolGrantT>& grant, messages::Kind kind,
                            messages::Place place) {
  if (place != messages::Place::Host) {
    return kind == messages::Kind::Act ? configure.gpu_act_blocks : configure.gpu_kv_blocks;
  }
  if (!grant) {
    return kNoBound;
  }
  return kind == messages::Kind::Act ? grant->act_blocks : grant->kv_blocks;
}

}  // namespace

bool is_kept(const messages::AttentionEntry& entry) {
  return entry.place() == messages::Place::Host || entry.place() == messages::Place::Gpu;
}

bool is_in_place(const messages::AttentionEntry& entry) {
  return entry.where() == messages::Where::HostInPlace;
}

bool is_absorbed(const messages::AttentionEntry& entry) {
  return entry.where() == messages::Where::Activation;
}

bool takes_part(const messages::MiniBatchT& batch, std::size_t sequence, std::uint64_t block) {
  const std::uint64_t context = batch.sequences[sequence].context();
  return context % kBlockTokens != 0 && context / kBlockTokens == block &&
         std::ranges::any_of(batch.taken_over, [&](const auto& taken) {
           return taken->sequence == sequence && !taken->tokens.empty() &&
                  std::uint64_t{taken->position} + taken->tokens.size() == context;
         });
}

std::vector<std::string> wrong_on_host(const messages::MiniBatchT& batch) {
  std::vector<std::string> wrong;
  const std::int64_t count = std::ranges::count_if(batch.entries, is_in_place);
  if (count < std::ssize(batch.entries)) {
    wrong.push_back(
        fmt::format("host cores attend {} of its {} entries", count, batch.entries.size()));
  }
  if (!batch.loads.empty() || !batch.regenerate.empty()) {
    wrong.emplace_back("host cores attend it, and it loads or regenerates blocks");
  }
  std::set<CheckedBlockName> taken;
  for (const messages::AttentionEntry& entry : batch.entries) {
    if (entry.place() == messages::Place::Dropped) {
      continue;
    }
    if (is_in_place(entry) && entry.place() != messages::Place::Host) {
      wrong.push_back(fmt::format("host cores attend {}", to_text(name_of(entry))));
    }
    if (is_in_place(entry) && !taken.insert(name_of(entry)).second) {
      wrong.push_back(fmt::format("two entries are {}", to_text(name_of(entry))));
    }
  }
  return wrong;
}

std::vector<std::string> wrong_absorbed(const messages::MiniBatchT& batch, bool configured) {
  std::vector<std::string> wrong;
  if (!configured && std::ranges::any_of(batch.entries, is_absorbed)) {
    wrong.emplace_back("it attends activations as they are, which is not configured");
  }
  for (std::size_t i = 0; i < batch.sequences.size(); ++i) {
    const messages::Sequence& sequence = batch.sequences[i];
    if (sequence.new_tokens() > 1 && std::ranges::any_of(entries_of(batch, sequence), is_absorbed)) {
      wrong.push_back(fmt::format("sequence {} (request {}): {} new rows attend activations, which "
                                  "only one does",
                                  i, sequence.request(), sequence.new_tokens()));
    }
  }
  return wrong;
}

std::span<const messages::AttentionEntry> entries_of(const messages::MiniBatchT& batch,
                                                     const messages::Sequence& sequence) {
  const std::size_t first = std::min<std::size_t>(sequence.first_entry(), batch.entries.size());
  return {batch.entries.data() + first,
          std::min<std::size_t>(blocks_of(sequence), batch.entries.size() - first)};
}

MiniBatchCheck::MiniBatchCheck(LogCheck& log, const messages::MiniBatchT& batch,
                               std::uint32_t number)
    : log_(log),
      batch_(batch),
      number_(number),
      where_(fmt::format("iteration {}, mini-batch {}", log.order_->number, number)) {}

void MiniBatchCheck::run() {
  if (!check_sizes()) {
    return;
  }
  if (std::ranges::any_of(batch_.entries, is_in_place)) {
    log_.order_->on_host.insert(number_);
    for (const std::string& wrong : wrong_on_host(batch_)) {
      violation(wrong);
    }
    if (!log_.configure_->host_attention) {
      violation("host cores attend it, which is not configured");
    }
  }
  for (const std::string& wrong : wrong_absorbed(batch_, log_.configure_->absorption)) {
    violation(wrong);
  }
  claim_slots();
  load();
  regenerate();
  read_texts();
  place_new_rows();
  attend();
  store();
  check_samples();
}

std::string MiniBatchCheck::at(std::uint32_t sequence) const {
  return fmt::format("{}, sequence {} (request {})", where_, sequence,
                     batch_.sequences[sequence].request());
}

bool MiniBatchCheck::check_sizes() {
  const messages::ConfigureT& configure = *log_.configure_;
  if (batch_.tokens.size() > static_cast<std::size_t>(configure.max_mini_batch_rows)) {
    violation(fmt::format("{} rows, {} are configured", batch_.tokens.size(),
                          configure.max_mini_batch_rows));
  }
  if (batch_.sequences.size() > static_cast<std::size_t>(configure.max_sequences)) {
    violation(fmt::format("{} sequences, {} are configured", batch_.sequences.size(),
                          configure.max_sequences));
  }
  if (const std::size_t prompts = batch_.prompt_tokens.size();  // they may be left out
      prompts != 0 && prompts != batch_.sequences.size()) {
    violation(fmt::format("{} sequences, but the prompt's tokens of {}", batch_.sequences.size(),
                          prompts));
  }
  std::vector<bool> used(batch_.entries.size());
  std::size_t rows = 0;
  for (std::uint32_t i = 0; i < batch_.sequences.size(); ++i) {
    const messages::Sequence& sequence = batch_.sequences[i];
    if (!check_size(sequence, i, rows)) {
      return false;
    }
    rows += sequence.new_tokens();
    sequence_of_row_.resize(rows, i);
    std::fill_n(used.begin() + sequence.first_entry(), entries_of(batch_, sequence).size(), true);
  }
  if (rows != batch_.tokens.size()) {
    violation(fmt::format("its sequences have {} rows of {}", rows, batch_.tokens.size()));
    return false;
  }
  if (const auto unused = std::ranges::find(used, false); unused != used.end()) {
    violation(fmt::format("entry {} is of no sequence", unused - used.begin()));
  }
  return true;
}

// `rows`: of the sequences before it.
bool MiniBatchCheck::check_size(const messages::Sequence& sequence, std::uint32_t index,
                                std::size_t rows) {
  const std::size_t left = batch_.tokens.size() - rows;
  if (sequence.new_tokens() == 0 || sequence.first_row() != rows || sequence.new_tokens() > left) {
    log_.violation(at(index),
                   fmt::format("{} rows from {}, the next row is {} of {}", sequence.new_tokens(),
                               sequence.first_row(), rows, batch_.tokens.size()));
    return false;
  }
  if (end_of(sequence) > static_cast<std::uint64_t>(log_.configure_->max_context)) {
    log_.violation(at(index), fmt::format("{} tokens, {} are configured", end_of(sequence),
                                          log_.configure_->max_context));
    return false;
  }
  const auto entries = entries_of(batch_, sequence);
  if (entries.size() < blocks_of(sequence)) {
    log_.violation(at(index), fmt::format("{} entries of {}", entries.size(), blocks_of(sequence)));
    return false;
  }
  return true;
}

// Where an entry's keys and values (or activations) stand; null where that is nowhere.
MiniBatchCheck::Slot* MiniBatchCheck::slot_of(const messages::AttentionEntry& entry) {
  if (entry.where() == messages::Where::HostInPlace ||
      entry.place() == messages::Place::Dropped) {
    return nullptr;
  }
  const int buffer = entry.where() == messages::Where::LoadedKv ? 0 : 1;
  return entry.slot() < slots_in(buffer, entry.place(), *log_.configure_)
             ? &slots_[buffer][entry.slot()]
             : nullptr;
}

void MiniBatchCheck::claim_slots() {
  for (std::size_t i = 0; i < batch_.entries.size(); ++i) {
    const messages::AttentionEntry& entry = batch_.entries[i];
    const bool kv =
        entry.where() == messages::Where::LoadedKv || entry.where() == messages::Where::HostInPlace;
    if (entry.kind() != (kv ? messages::Kind::Kv : messages::Kind::Act)) {
      violation(fmt::format("entry {}: {} cannot be read as {}", i, to_text(name_of(entry)),
                            messages::EnumNameWhere(entry.where())));
    }
    const std::int64_t blocks =
        blocks_in_pool(*log_.configure_, log_.grant_, entry.kind(), entry.place());
    if (is_kept(entry) && entry.block() >= blocks) {
      violation(fmt::format("entry {}: there are {} of {}", i, blocks, to_text(name_of(entry))));
    }
    if (entry.where() == messages::Where::HostInPlace ||
        entry.place() == messages::Place::Dropped) {
      continue;
    }
    Slot* slot = slot_of(entry);
    if (slot == nullptr) {
      violation(fmt::format("entry {}: slot {} of {}", i, entry.slot(),
                            slots_in(kv ? 0 : 1, entry.place(), *log_.configure_)));
    } else if (slot->entry >= 0) {
      const messages::AttentionEntry& other = batch_.entries[static_cast<std::size_t>(slot->entry)];
      if (is_kept(entry) && name_of(other) == name_of(entry) && other.where() == entry.where()) {
        continue;  // check_sharing: both only read it
      }
      violation(fmt::format("slot {} is of {} and of {}", entry.slot(), to_text(name_of(other)),
                            to_text(name_of(entry))));
    } else {
      slot->entry = static_cast<std::int64_t>(i);
    }
  }
}

void MiniBatchCheck::load() {
  for (const messages::BlockRun& run : batch_.loads) {
    load(run);
  }
}

void MiniBatchCheck::load(const messages::BlockRun& run) {
  const int buffer = run.kind() == messages::Kind::Kv ? 0 : 1;
  for (std::uint32_t i = 0; i < run.count(); ++i) {
    const CheckedBlockName name{run.kind(), run.place(), run.first_block() + i};
    const std::uint64_t to = std::uint64_t{run.first_slot()} + i;
    ++log_.report_.blocks_loaded;
    const std::uint32_t slots = slots_in(buffer, run.place(), *log_.configure_);
    const auto found =
        to < slots ? slots_[buffer].find(static_cast<std::uint32_t>(to)) : slots_[buffer].end();
    if (found == slots_[buffer].end() || found->second.loaded) {
      violation(fmt::format("{} is loaded to slot {} of {}{}", to_text(name), to, slots,
                            found != slots_[buffer].end() ? ", which is loaded already"
                            : to < slots                  ? ", which is of no entry"
                                                          : ""));
      return;
    }
    const std::int64_t blocks =
        blocks_in_pool(*log_.configure_, log_.grant_, name.kind, name.place);
    if (name.number >= blocks) {
      violation(fmt::format("loads {} of {}", to_text(name), blocks));
    }
    Slot& slot = found->second;
    slot.loaded = name;
    const CheckedBlock* block = log_.memory_.find(name);
    const int tokens = i + 1 == run.count() ? run.tail_tokens() : kBlockTokens;
    for (int token = 0; token < std::min(tokens, kBlockTokens); ++token) {
      const auto row = static_cast<std::size_t>(token);
      if (block == nullptr || (*block)[row].request == 0) {
        if (log_.late_) {  // it was written before the log begins
          continue;
        }
        violation(fmt::format("loads token {} of {}: it was never written", token, to_text(name)));
        break;
      }
      (run.kind() == messages::Kind::Kv ? slot.rows : slot.act)[row] = (*block)[row];
    }
    log_.order_->read(name, number_);
  }
}

void MiniBatchCheck::regenerate() {
  for (const messages::SlotRange& range : batch_.regenerate) {
    for (std::uint64_t at = range.first_slot();
         at < std::uint64_t{range.first_slot()} + range.count(); ++at) {
      const auto slot = slots_[1].find(static_cast<std::uint32_t>(at));
      if (at > UINT32_MAX || slot == slots_[1].end() || !slot->second.loaded || slot->second.made) {
        const bool made = at <= UINT32_MAX && slot != slots_[1].end() && slot->second.made;
        violation(fmt::format("makes keys and values in slot {}, which {}", at,
                              made ? "has them already" : "nothing is loaded to"));
        break;
      }
      slot->second.made = true;
      slot->second.rows = slot->second.act;
    }
  }
}

}  // namespace poise
