// SPDX-License-Identifier: Apache-2.0
// Capture and graphs: what is recorded and frozen, what is refused, which misuse of graphs is reported, and capture beside
// running steps.
#include <atomic>
#include <thread>

#include "tests/cuda_host/test_device.h"

namespace cuda_host {
namespace {

constexpr std::uint64_t seeds = 20;

class Capture : public Emulation {
 protected:
  template <class Body>
  static cudaGraphExec_t make_graph(cudaStream_t stream, Body body) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
    EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    EXPECT_CUDA(cudaGraphDestroy(graph));
    return executable;
  }
};

TEST_F(Capture, a_replay_runs_copies_fills_and_kernels_in_order) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    Array<int> data(2);
    Pinned<int> staging(1);
    Pinned<int> result(2);
    clear_log();
    const cudaGraphExec_t graph = make_graph(stream, [&] {
      EXPECT_CUDA(cudaMemsetAsync(data.get(), 0, 8, stream));
      EXPECT_CUDA(cudaMemcpyAsync(data.get(), staging.get(), 4, cudaMemcpyHostToDevice, stream));
      EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::copy_value, static_cast<const int*>(data.get()), data.get() + 1));
      EXPECT_CUDA(cudaMemcpyAsync(result.get(), data.get(), 8, cudaMemcpyDeviceToHost, stream));
    });
    for (const LogEntry& entry : log()) EXPECT_NE(entry.action, Action::Ran) << "capture runs nothing";
    for (const int value : {3, 4}) {
      staging[0] = value;
      ASSERT_CUDA(cudaGraphLaunch(graph, stream));
      ASSERT_CUDA(cudaStreamSynchronize(stream));
      EXPECT_EQ(result[0], value);
      EXPECT_EQ(result[1], value);
    }
    ASSERT_CUDA(cudaGraphExecDestroy(graph));
  }
}

TEST_F(Capture, nodes_are_counted_by_type) {
  cudaStream_t stream = make_stream();
  Array<int> data(1);
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_CUDA(cudaMemsetAsync(data.get(), 0, 4, stream));
  ASSERT_CUDA(launch(stream, 1, 1, 0, kernels::do_nothing));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  std::size_t count = 0;
  ASSERT_CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  ASSERT_EQ(count, 2U);
  cudaGraphNode_t nodes[2];
  ASSERT_CUDA(cudaGraphGetNodes(graph, nodes, &count));
  cudaGraphNodeType type{};
  ASSERT_CUDA(cudaGraphNodeGetType(nodes[0], &type));
  EXPECT_EQ(type, cudaGraphNodeTypeMemset);
  ASSERT_CUDA(cudaGraphNodeGetType(nodes[1], &type));
  EXPECT_EQ(type, cudaGraphNodeTypeKernel);
}

TEST_F(Capture, an_argument_is_what_it_was_at_capture) {
  cudaStream_t stream = make_stream();
  Array<int> out(1);
  int position = 1;
  const cudaGraphExec_t graph =
      make_graph(stream, [&] { EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), position)); });
  position = 2;
  ASSERT_CUDA(cudaGraphLaunch(graph, stream));
  EXPECT_EQ(out.read()[0], 1) << "a host value of the capture shows in every replay";
}

TEST_F(Capture, forks_and_joins_become_dependencies) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    cudaStream_t side = make_stream();
    cudaEvent_t fork = make_event();
    cudaEvent_t join = make_event();
    Array<int> data(3);
    const cudaGraphExec_t graph = make_graph(stream, [&] {
      EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, data.get(), 7));
      EXPECT_CUDA(cudaEventRecord(fork, stream));
      EXPECT_CUDA(cudaStreamWaitEvent(side, fork, 0));
      EXPECT_CUDA(launch(side, 1, 1, 0, kernels::copy_value, static_cast<const int*>(data.get()), data.get() + 1));
      EXPECT_CUDA(cudaEventRecord(join, side));
      EXPECT_CUDA(cudaStreamWaitEvent(stream, join, 0));
      EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::copy_value, static_cast<const int*>(data.get() + 1), data.get() + 2));
    });
    ASSERT_CUDA(cudaGraphLaunch(graph, stream));
    EXPECT_EQ(data.read(), (std::vector<int>{7, 7, 7}));
  }
}

TEST_F(Capture, a_fork_that_is_not_joined_is_an_error) {
  cudaStream_t stream = make_stream();
  cudaStream_t side = make_stream();
  cudaEvent_t fork = make_event();
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_CUDA(cudaEventRecord(fork, stream));
  ASSERT_CUDA(cudaStreamWaitEvent(side, fork, 0));
  ASSERT_CUDA(launch(side, 1, 1, 0, kernels::do_nothing));
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
}

TEST_F(Capture, allocation_waiting_asking_and_host_reads_are_refused_and_spoil_the_capture) {
  cudaStream_t other = make_stream();
  cudaEvent_t event = make_event();
  ASSERT_CUDA(cudaEventRecord(event, other));
  Array<int> data(1);
  void* memory = nullptr;
  int host = 0;
  const std::vector<std::pair<const char*, std::function<cudaError_t(cudaStream_t)>>> forbidden{
      {"cudaMalloc", [&](cudaStream_t) { return cudaMalloc(&memory, 16); }},
      {"cudaHostAlloc", [&](cudaStream_t) { return cudaHostAlloc(&memory, 16, 0); }},
      {"cudaFree", [&](cudaStream_t) { return cudaFree(data.get()); }},
      {"cudaStreamSynchronize", [&](cudaStream_t stream) { return cudaStreamSynchronize(stream); }},
      {"cudaStreamSynchronize of another", [&](cudaStream_t) { return cudaStreamSynchronize(other); }},
      {"cudaDeviceSynchronize", [&](cudaStream_t) { return cudaDeviceSynchronize(); }},
      {"cudaStreamQuery", [&](cudaStream_t stream) { return cudaStreamQuery(stream); }},
      {"cudaEventQuery", [&](cudaStream_t) { return cudaEventQuery(event); }},
      {"cudaEventSynchronize", [&](cudaStream_t) { return cudaEventSynchronize(event); }},
      {"cudaMemcpy", [&](cudaStream_t) { return cudaMemcpy(&host, data.get(), 4, cudaMemcpyDeviceToHost); }},
      {"cudaMemset", [&](cudaStream_t) { return cudaMemset(data.get(), 0, 4); }},
      {"cudaMemcpyAsync",
       [&](cudaStream_t stream) { return cudaMemcpyAsync(data.get(), &host, 4, cudaMemcpyHostToDevice, stream); }},
  };
  for (const auto& [name, call] : forbidden) {
    SCOPED_TRACE(name);
    cudaStream_t stream = make_stream();
    ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(call(stream), cudaErrorStreamCaptureUnsupported);
    cudaStreamCaptureStatus status{};
    ASSERT_CUDA(cudaStreamIsCapturing(stream, &status));
    EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(launch(stream, 1, 1, 0, kernels::do_nothing), cudaErrorStreamCaptureInvalidated);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    ASSERT_CUDA(cudaStreamSynchronize(stream)) << "the stream is usable again";
  }
  expect_faults(FaultKind::PageableCopy, "cudaMemcpyAsync");
}

TEST_F(Capture, an_event_from_outside_cannot_be_waited_for_inside) {
  cudaStream_t other = make_stream();
  cudaStream_t stream = make_stream();
  cudaEvent_t event = make_event();
  ASSERT_CUDA(cudaEventRecord(event, other));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureIsolation);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, the_legacy_stream_is_refused_while_a_blocking_stream_captures) {
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  EXPECT_EQ(launch(nullptr, 1, 1, 0, kernels::do_nothing), cudaErrorStreamCaptureImplicit);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Capture, a_graph_destroyed_while_its_replay_is_queued_is_reported) {
  int found = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t stream = make_stream();
    Array<int> out(1);
    const cudaGraphExec_t graph =
        make_graph(stream, [&] { EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out.get(), 1)); });
    ASSERT_CUDA(cudaGraphLaunch(graph, stream));
    ASSERT_CUDA(cudaGraphExecDestroy(graph));
    found += take_faults().empty() ? 0 : 1;
    EXPECT_EQ(out.read()[0], 1);
  }
  EXPECT_GT(found, static_cast<int>(seeds) / 2);
}

TEST_F(Capture, a_destroyed_graph_cannot_be_launched) {
  cudaStream_t stream = make_stream();
  const cudaGraphExec_t graph = make_graph(stream, [&] { EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::do_nothing)); });
  ASSERT_CUDA(cudaGraphExecDestroy(graph));
  EXPECT_EQ(cudaGraphLaunch(graph, stream), cudaErrorInvalidValue);
  expect_faults(FaultKind::BadHandle, "cudaGraphLaunch", "executable graph");
}

TEST_F(Capture, a_replay_that_uses_freed_memory_is_reported) {
  cudaStream_t stream = make_stream();
  int* out = nullptr;
  ASSERT_CUDA(cudaMalloc(&out, 4));
  const cudaGraphExec_t graph = make_graph(stream, [&] { EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::write_value, out, 1)); });
  ASSERT_CUDA(cudaFree(out));
  ASSERT_CUDA(cudaGraphLaunch(graph, stream));
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  expect_faults(FaultKind::UseAfterFree, "");
}

TEST_F(Capture, executable_graphs_take_device_memory_while_they_live) {
  cudaStream_t stream = make_stream();
  std::size_t before = 0;
  std::size_t during = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&before, &total));
  const cudaGraphExec_t graph = make_graph(stream, [&] { EXPECT_CUDA(launch(stream, 1, 1, 0, kernels::do_nothing)); });
  ASSERT_CUDA(cudaMemGetInfo(&during, &total));
  ASSERT_CUDA(cudaGraphExecDestroy(graph));
  ASSERT_CUDA(cudaMemGetInfo(&after, &total));
  EXPECT_LT(during, before);
  EXPECT_EQ(after, before);
  EXPECT_EQ(live().executable_graphs, 0U);
}

TEST_F(Capture, only_the_thread_that_began_a_capture_may_end_it) {
  cudaStream_t stream = make_stream();
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  std::thread([&] { EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureWrongThread); }).join();
  EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
}

TEST_F(Capture, a_global_capture_is_spoilt_by_another_thread_s_allocation_and_a_local_one_is_not) {
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
    cudaStream_t stream = make_stream();
    ASSERT_CUDA(cudaStreamBeginCapture(stream, mode));
    std::thread([&] {
      void* memory = nullptr;
      const cudaError_t error = cudaMalloc(&memory, 16);
      EXPECT_EQ(error, mode == cudaStreamCaptureModeGlobal ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
      if (error == cudaSuccess) {
        EXPECT_CUDA(cudaFree(memory));
      }
    }).join();
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph),
              mode == cudaStreamCaptureModeGlobal ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
  }
}

TEST_F(Capture, the_device_cannot_be_waited_for_while_any_thread_captures) {
  cudaStream_t stream = make_stream();
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  std::thread([&] { EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported); }).join();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
}

// Held in the middle of a capture by the test, not by a clock: the steps of the other thread finish all the same, and the log
// shows it.
TEST_F(Capture, steps_of_one_thread_finish_while_another_captures) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    reset({.seed = seed});
    cudaStream_t steps = make_stream();
    cudaStream_t builder = make_stream();
    Array<int> out(1);
    Array<int> captured(1);
    clear_log();
    std::atomic<int> phase{0};
    cudaGraphExec_t graph = nullptr;
    std::thread capturing([&] {
      graph = make_graph(builder, [&] {
        EXPECT_CUDA(launch(builder, 1, 1, 0, kernels::write_value, captured.get(), 1));
        phase = 1;
        phase.notify_all();
        phase.wait(1);
        EXPECT_CUDA(launch(builder, 1, 1, 0, kernels::write_value, captured.get(), 2));
      });
    });
    phase.wait(0);
    for (int step = 0; step < 5; ++step) {
      ASSERT_CUDA(launch(steps, 1, 1, 0, kernels::write_value, out.get(), step));
      ASSERT_CUDA(cudaStreamSynchronize(steps));
    }
    phase = 2;
    phase.notify_all();
    capturing.join();
    const std::vector<LogEntry> entries = log();
    int inside = 0;
    bool is_capturing = false;
    for (const LogEntry& entry : entries) {
      if (entry.action == Action::CaptureBegan) is_capturing = true;
      if (entry.action == Action::CaptureEnded) is_capturing = false;
      if (!is_capturing || entry.action != Action::Ran) continue;
      EXPECT_EQ(entry.stream, stream_number(steps));
      ++inside;
    }
    EXPECT_EQ(inside, 5);
    ASSERT_CUDA(cudaGraphLaunch(graph, steps));
    EXPECT_EQ(out.read()[0], 4);
    EXPECT_EQ(captured.read()[0], 2);
  }
}

TEST_F(Capture, threads_may_launch_and_wait_at_the_same_time) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      cudaStream_t stream = make_stream();
      Array<float> from(ascending(128));
      Array<float> to(128);
      Pinned<float> host(128);
      for (int i = 0; i < 20; ++i) {
        EXPECT_CUDA(launch(stream, 1, 128, 512, kernels::reverse, from.get(), to.get()));
        EXPECT_CUDA(cudaMemcpyAsync(host.get(), to.get(), 512, cudaMemcpyDeviceToHost, stream));
        EXPECT_CUDA(cudaStreamSynchronize(stream));
        EXPECT_EQ(host[0], 128.0F) << "thread " << t;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace cuda_host
