// Threads that take numbered pieces of a job, and sleep between jobs.
#pragma once

#include <cstdint>

namespace whorl {

// Runs part(context, i) for i in [0, count) on the calling thread and on sleeping ones, and returns when all are done.
// Which thread runs a piece is left to chance, so no result may depend on it. A job of one piece, or one that comes
// while another runs, stays on the calling thread.
using Part = void (*)(const void* context, int64_t i);
void run_parts(Part part, const void* context, int64_t count);

template <class Function>
void parallel(int64_t count, const Function& function) {
  run_parts([](const void* context, int64_t i) { (*static_cast<const Function*>(context))(i); }, &function, count);
}

int num_threads();
void set_num_threads(int count);

}  // namespace whorl
