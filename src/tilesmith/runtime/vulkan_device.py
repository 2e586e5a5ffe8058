"""One Vulkan device: its buffers, pipelines and launches. `vk` below is the module of the `vulkan` package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from tilesmith.codegen import KernelIR
from tilesmith.hardware.limits import Limits
from tilesmith.runtime import cache, cuda, vulkan_cuda

STORAGE, UNIFORM = 7, 6
"""Descriptor types: of a tensor, of the scalars."""

_SCRATCH, _STAGE = -1, -2  # buffers that no kernel sees: in the device's memory, in the host's
_USAGE = {STORAGE: 0x20 | 1 | 2, UNIFORM: 0x10, _SCRATCH: 1 | 2, _STAGE: 1 | 2}  # copies go from 1, to 2
_STAGE_BYTES = 32 << 20
_FLUSH_PARTS = 64
_END, _HOST, _ALL_STAGES = 0x2000, 0x4000, 0x10000  # of the pipeline
# of memory: the device's own, visible to the host and coherent, cached by the host
_LOCAL, _MAPPED, _CACHED = 1, 2 | 4, 8
_SHARED = _LOCAL | _MAPPED | _CACHED  # as on integrated GPUs and CPUs
_MEMORY = {STORAGE: (0, _LOCAL), UNIFORM: (_MAPPED, _LOCAL), _SCRATCH: (0, _LOCAL), _STAGE: (_MAPPED, _CACHED)}
"""What the memory of a buffer must have, and what it should have besides and nothing else."""
_PREFERRED = {2: 0, 1: 1, 3: 2, 4: 3}  # device types: discrete, integrated, virtual, CPU
_SUBGROUP_OPERATIONS = 1 | 4 | 16  # basic, arithmetic, shuffle
_CONVERSIONS, _REDUCTIONS = "VK_NV_cooperative_matrix2", 6  # the word of its features; conversions come next
_MATRIX, _SUBGROUP_SIZE = "VK_KHR_cooperative_matrix", "VK_EXT_subgroup_size_control"
_FULL_SUBGROUPS = 2  # of a pipeline's shader stage
# NVIDIA's driver checks each access against its buffer's bounds, unless this says that it need not: a store becomes a
# branch, behind which it moves the loads of what the next one writes. Softmax of 32,768 columns with eight vectors at
# once: 168 µs, unchecked 145 (H200). Kernels keep to their buffers, which the interpreter proves.
_ROBUSTNESS, _UNCHECKED = "VK_EXT_pipeline_robustness", 1
_ALL = 2**64 - 1


class Buffer(NamedTuple):
    """A buffer, and its bytes as the host sees them; None where it does not, or only slowly."""

    handle: Any
    memory: Any


class Pipeline(NamedTuple):
    """A compiled kernel and the kinds of its bindings."""

    descriptors: Any
    layout: Any
    handle: Any
    kinds: list[int]


def _chosen(vk: ModuleType, instance: Any) -> tuple[Any, Any]:
    """The properties and the handle of torch's current CUDA device where a driver offers it, else of the best device.

    Vulkan sees all GPUs, also those that CUDA_VISIBLE_DEVICES hides.
    """
    found = [(vk.vkGetPhysicalDeviceProperties(p), p) for p in vk.vkEnumeratePhysicalDevices(instance)]
    able = [(q, p) for q, p in found if q.apiVersion >= vk.VK_MAKE_VERSION(1, 2, 0)]
    if not able:
        raise vk.VkErrorIncompatibleDriver("no device supports Vulkan 1.2")
    wanted = cuda.device_uuid()

    def rank(one: tuple[Any, Any]) -> tuple[bool, int]:
        identity = vk.VkPhysicalDeviceIDProperties()
        vk.vkGetPhysicalDeviceProperties2(one[1], vk.VkPhysicalDeviceProperties2(pNext=identity))
        return bytes(identity.deviceUUID) != wanted, _PREFERRED.get(one[0].deviceType, 4)

    return min(able, key=rank)


def _conversion_features(vk: ModuleType, reductions: int = 0, conversions: int = 0) -> Any:
    """VkPhysicalDeviceCooperativeMatrix2FeaturesNV in words, since the package does not know it: see _REDUCTIONS."""
    return vk.ffi.new("uint32_t[12]", [1_000_593_000, 0, 0, 0, 0, 0, reductions, conversions])


class Device:
    """The device that `_chosen` says; it lives as long as the process.

    features: of `f16`, `subgroups`, `fragments`, `conversions`, as in `KernelIR.features`. limits: what a workgroup may
    use. shares: whether the host sees its memory as fast as its own; else tensors are copied through `_stage`. exports:
    whether CUDA can be shown its memory, on the GPU whose `uuid` it has. unchecked: whether the driver leaves out
    bounds checks.
    """

    def __init__(self, vk: ModuleType) -> None:
        self.vk = vk
        app = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 3, 0))
        self.instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None)
        self.properties, self.physical = _chosen(vk, self.instance)
        identity = vk.VkPhysicalDeviceIDProperties()
        vk.vkGetPhysicalDeviceProperties2(self.physical, vk.VkPhysicalDeviceProperties2(pNext=identity))
        self.uuid = bytes(identity.deviceUUID)
        self.name = self.properties.deviceName
        limits = self.properties.limits
        self.max_groups = tuple(limits.maxComputeWorkGroupCount)
        self.largest_buffer = limits.maxStorageBufferRange
        shared, size = limits.maxComputeSharedMemorySize, tuple(limits.maxComputeWorkGroupSize)
        self.limits = Limits(self.name, shared, limits.maxComputeWorkGroupInvocations, size)
        self.memory_types = vk.vkGetPhysicalDeviceMemoryProperties(self.physical)
        self.shares = bool(self._memory_types(_ALL, _SHARED, 0))
        self._staging: Buffer | None = None
        families = enumerate(vk.vkGetPhysicalDeviceQueueFamilyProperties(self.physical))
        self.family = next(k for k, f in families if f.queueFlags & vk.VK_QUEUE_COMPUTE_BIT)
        self.features: set[str] = set()
        self.subgroup_sizes = (0, 0)
        self.device = self._create()
        self.queue = vk.vkGetDeviceQueue(self.device, self.family, 0)
        info = vk.VkCommandPoolCreateInfo(queueFamilyIndex=self.family)
        self.pool = vk.vkCreateCommandPool(self.device, info, None)
        self.cache = self._pipeline_cache()

    def _create(self):
        """The logical device, with what kernels may use and it has."""
        vk = self.vk
        names = {e.extensionName for e in vk.vkEnumerateDeviceExtensionProperties(self.physical, None)}
        sizes_known = self.properties.apiVersion >= vk.VK_MAKE_VERSION(1, 3, 0) or _SUBGROUP_SIZE in names
        matrix = vk.VkPhysicalDeviceCooperativeMatrixFeaturesKHR()
        sizes = vk.VkPhysicalDeviceSubgroupSizeControlFeatures(pNext=matrix if _MATRIX in names else None)
        conversions = _conversion_features(vk)
        if _CONVERSIONS in names:
            matrix.pNext = vk.ffi.cast("void*", conversions)
        known = sizes if sizes_known else sizes.pNext
        robustness = vk.VkPhysicalDevicePipelineRobustnessFeaturesEXT(pNext=known)
        v12 = vk.VkPhysicalDeviceVulkan12Features(pNext=robustness if _ROBUSTNESS in names else known)
        v11 = vk.VkPhysicalDeviceVulkan11Features(pNext=v12)
        vk.vkGetPhysicalDeviceFeatures2(self.physical, vk.VkPhysicalDeviceFeatures2(pNext=v11))
        size_range = vk.VkPhysicalDeviceSubgroupSizeControlProperties()
        subgroups = vk.VkPhysicalDeviceVulkan11Properties(pNext=size_range if sizes_known else None)
        vk.vkGetPhysicalDeviceProperties2(self.physical, vk.VkPhysicalDeviceProperties2(pNext=subgroups))
        if v12.shaderFloat16 and v11.storageBuffer16BitAccess:
            self.features.add("f16")
        if subgroups.subgroupSupportedOperations & _SUBGROUP_OPERATIONS == _SUBGROUP_OPERATIONS:
            self.features.add("subgroups")
        self.subgroup_sizes = (subgroups.subgroupSize, subgroups.subgroupSize)
        if sizes.subgroupSizeControl and sizes.computeFullSubgroups:
            self.subgroup_sizes = (size_range.minSubgroupSize, size_range.maxSubgroupSize)
        if matrix.cooperativeMatrix and v12.vulkanMemoryModel and self.fixes_subgroup(32):
            self.features.add("fragments")
            if conversions[_REDUCTIONS] and conversions[_REDUCTIONS + 1]:
                self.features.add("conversions")
        self.exports = vulkan_cuda.EXTENSION in names and vulkan_cuda.exports(vk, self.physical, _USAGE[STORAGE])
        # A queried chain also says what to enable, so it is built again with only that.
        chain = None
        wanted = [vulkan_cuda.EXTENSION] * self.exports
        if "fragments" in self.features:
            if "conversions" in self.features:
                conversions = _conversion_features(vk, 1, 1)
                chain = vk.ffi.cast("void*", conversions)
                wanted.append(_CONVERSIONS)
            chain = vk.VkPhysicalDeviceCooperativeMatrixFeaturesKHR(pNext=chain, cooperativeMatrix=1)
            wanted.append(_MATRIX)
        if sizes.subgroupSizeControl and sizes.computeFullSubgroups:
            chain = vk.VkPhysicalDeviceSubgroupSizeControlFeatures(
                pNext=chain, subgroupSizeControl=1, computeFullSubgroups=1
            )
            wanted += [_SUBGROUP_SIZE] * (_SUBGROUP_SIZE in names)
        self.unchecked = bool(robustness.pipelineRobustness)
        if self.unchecked:
            chain = vk.VkPhysicalDevicePipelineRobustnessFeaturesEXT(pNext=chain, pipelineRobustness=1)
            wanted.append(_ROBUSTNESS)
        half, model = int("f16" in self.features), int("fragments" in self.features)
        v12 = vk.VkPhysicalDeviceVulkan12Features(pNext=chain, shaderFloat16=half, vulkanMemoryModel=model)
        v11 = vk.VkPhysicalDeviceVulkan11Features(pNext=v12, storageBuffer16BitAccess=half)
        queues = [vk.VkDeviceQueueCreateInfo(queueFamilyIndex=self.family, pQueuePriorities=[1.0])]
        info = vk.VkDeviceCreateInfo(pNext=v11, pQueueCreateInfos=queues, ppEnabledExtensionNames=wanted)
        return vk.vkCreateDevice(self.physical, info, None)

    def fixes_subgroup(self, size: int) -> bool:
        """Whether a kernel may count on subgroups of `size` threads."""
        low, high = self.subgroup_sizes
        return low <= size <= high

    def buffer(self, size: int, kind: int, frees: contextlib.ExitStack) -> Buffer:
        """A buffer of `size` bytes."""
        vk = self.vk
        info = vk.VkBufferCreateInfo(size=size, usage=_USAGE[kind], sharingMode=0)
        handle = vk.vkCreateBuffer(self.device, info, None)
        frees.callback(vk.vkDestroyBuffer, self.device, handle, None)
        needs = vk.vkGetBufferMemoryRequirements(self.device, handle)
        needed, wanted = (_SHARED, 0) if kind == STORAGE and self.shares else _MEMORY[kind]
        memory = self._allocate(needs.size, self._memory_types(needs.memoryTypeBits, needed, wanted))
        frees.callback(vk.vkFreeMemory, self.device, memory, None)
        vk.vkBindBufferMemory(self.device, handle, memory, 0)
        return Buffer(handle, vk.vkMapMemory(self.device, memory, 0, size, 0) if needed else None)

    def shared_buffer(self, size: int, ir: KernelIR, frees: contextlib.ExitStack) -> tuple[Buffer, int]:
        """A buffer for a tensor, and its address to CUDA."""
        vk = self.vk
        external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=1)
        info = vk.VkBufferCreateInfo(pNext=external, size=size, usage=_USAGE[STORAGE], sharingMode=0)
        handle = vk.vkCreateBuffer(self.device, info, None)
        frees.callback(vk.vkDestroyBuffer, self.device, handle, None)
        needs = vk.vkGetBufferMemoryRequirements(self.device, handle)
        export = vk.VkExportMemoryAllocateInfo(handleTypes=1)
        memory = self._allocate(needs.size, self._memory_types(needs.memoryTypeBits, 0, _LOCAL), export)
        frees.callback(vk.vkFreeMemory, self.device, memory, None)
        vk.vkBindBufferMemory(self.device, handle, memory, 0)
        get = vk.vkGetDeviceProcAddr(self.device, "vkGetMemoryFdKHR")
        fd = get(self.device, vk.VkMemoryGetFdInfoKHR(memory=memory, handleType=1))
        return Buffer(handle, None), vulkan_cuda.mapped(fd, needs.size, size, ir, frees)

    def _memory_types(self, allowed: int, needed: int, wanted: int) -> list[int]:
        """The types of memory that have what is needed, best first."""
        found = []
        for k in range(self.memory_types.memoryTypeCount):
            has = self.memory_types.memoryTypes[k].propertyFlags
            # properties beyond these want features that are not enabled
            if allowed >> k & 1 and not needed & ~has and not has & ~_SHARED:
                found.append((bin(wanted & ~has).count("1"), bin(has & ~(wanted | needed)).count("1"), k))
        return [k for *_, k in sorted(found)]

    def _allocate(self, size: int, types: list[int], export: Any = None):
        """Memory of the first of these types that has room."""
        vk = self.vk
        for last, kind in zip([*([False] * (len(types) - 1)), True], types):
            try:
                return vk.vkAllocateMemory(
                    self.device, vk.VkMemoryAllocateInfo(pNext=export, allocationSize=size, memoryTypeIndex=kind), None
                )
            except (vk.VkErrorOutOfDeviceMemory, vk.VkErrorOutOfHostMemory):
                if last:
                    raise
        raise RuntimeError(f"{self.name} has no memory for a buffer of {size:,} bytes")

    def write(self, buffer: Buffer, data: memoryview) -> None:
        """Set the first bytes of a tensor's buffer."""
        if buffer.memory is not None:
            memoryview(buffer.memory)[: len(data)] = data
            return
        stage = self._stage()
        for start in range(0, len(data), _STAGE_BYTES):
            part = data[start : start + _STAGE_BYTES]
            memoryview(stage.memory)[: len(part)] = part
            self._copy(stage, buffer, 0, start, len(part))

    def read(self, buffer: Buffer, data: memoryview) -> None:
        """Fill `data` with the first bytes of a tensor's buffer."""
        if buffer.memory is not None:
            data[:] = memoryview(buffer.memory)[: len(data)]
            return
        stage = self._stage()
        for start in range(0, len(data), _STAGE_BYTES):
            part = data[start : start + _STAGE_BYTES]
            self._copy(buffer, stage, start, 0, len(part))
            part[:] = memoryview(stage.memory)[: len(part)]

    def _stage(self) -> Buffer:
        """The host's own memory, which copies go through: it does not cache what it sees of a discrete GPU's."""
        if self._staging is None:
            self._staging = self.buffer(_STAGE_BYTES, _STAGE, contextlib.ExitStack())
        return self._staging

    def _copy(self, source: Buffer, target: Buffer, source_offset: int, target_offset: int, size: int) -> None:
        """Copy bytes from one buffer to another."""
        vk = self.vk
        with self._commands() as commands:
            region = vk.VkBufferCopy(srcOffset=source_offset, dstOffset=target_offset, size=size)
            vk.vkCmdCopyBuffer(commands, source.handle, target.handle, 1, [region])
            self._everything_before(commands)

    def pipeline(self, module: bytes, entry: str, kinds: list[int], subgroup_size: int | None) -> Pipeline:
        """The compiled kernel; the driver's pipeline cache on disk grows with it."""
        vk = self.vk
        info = vk.VkShaderModuleCreateInfo(codeSize=len(module), pCode=module)
        shader = vk.vkCreateShaderModule(self.device, info, None)
        bindings = [
            vk.VkDescriptorSetLayoutBinding(binding=k, descriptorType=t, descriptorCount=1, stageFlags=32)
            for k, t in enumerate(kinds)
        ]
        info = vk.VkDescriptorSetLayoutCreateInfo(pBindings=bindings)
        descriptors = vk.vkCreateDescriptorSetLayout(self.device, info, None)
        layout = vk.vkCreatePipelineLayout(self.device, vk.VkPipelineLayoutCreateInfo(pSetLayouts=[descriptors]), None)
        size, flags = None, 0
        if subgroup_size is not None and self.subgroup_sizes[0] != self.subgroup_sizes[1]:
            size = vk.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo(requiredSubgroupSize=subgroup_size)
            flags = _FULL_SUBGROUPS
        stage = vk.VkPipelineShaderStageCreateInfo(pNext=size, flags=flags, stage=32, module=shader, pName=entry)
        checks = vk.VkPipelineRobustnessCreateInfoEXT(storageBuffers=_UNCHECKED) if self.unchecked else None
        info = vk.VkComputePipelineCreateInfo(pNext=checks, stage=stage, layout=layout)
        handle = vk.vkCreateComputePipelines(self.device, self.cache, 1, [info], None)[0]
        vk.vkDestroyShaderModule(self.device, shader, None)
        self._keep_cache()
        return Pipeline(descriptors, layout, handle, kinds)

    def dispatch(self, pipeline: Pipeline, buffers: list[Buffer], grid, frees: contextlib.ExitStack) -> None:
        """Run a kernel and wait for it."""
        vk = self.vk
        bound = self._bind(pipeline, buffers, frees)
        with self._commands() as commands:
            vk.vkCmdBindPipeline(commands, 1, pipeline.handle)
            vk.vkCmdBindDescriptorSets(commands, 1, pipeline.layout, 0, 1, [bound], 0, None)
            vk.vkCmdDispatch(commands, *grid)
            self._everything_before(commands)

    def measure(self, pipeline: Pipeline, buffers: list[Buffer], grid, rounds: int, frees) -> list[float]:
        """The µs of a kernel, once a round, by the device's clock.

        Before each round a large buffer is read, as `engine.timing` does. Not written: the kernel would be charged with
        what the L2 cache then has to write back.
        """
        vk = self.vk
        bound = self._bind(pipeline, buffers, frees)
        size = 256 << 20 if self.properties.deviceType in (1, 2) else 1 << 20
        part = size // _FLUSH_PARTS
        flush, target = self.buffer(size, _SCRATCH, frees), self.buffer(part, _SCRATCH, frees)
        queries = vk.vkCreateQueryPool(self.device, vk.VkQueryPoolCreateInfo(queryType=2, queryCount=2 * rounds), None)
        frees.callback(vk.vkDestroyQueryPool, self.device, queries, None)
        with self._commands() as commands:
            vk.vkCmdResetQueryPool(commands, queries, 0, 2 * rounds)
            vk.vkCmdBindPipeline(commands, 1, pipeline.handle)
            vk.vkCmdBindDescriptorSets(commands, 1, pipeline.layout, 0, 1, [bound], 0, None)
            vk.vkCmdFillBuffer(commands, flush.handle, 0, size, 1)
            self._everything_before(commands)
            for k in range(rounds):
                for start in range(0, size, part):
                    region = vk.VkBufferCopy(srcOffset=start, dstOffset=0, size=part)
                    vk.vkCmdCopyBuffer(commands, flush.handle, target.handle, 1, [region])
                self._everything_before(commands)
                vk.vkCmdWriteTimestamp(commands, _END, queries, 2 * k)
                vk.vkCmdDispatch(commands, *grid)
                self._everything_before(commands)
                vk.vkCmdWriteTimestamp(commands, _END, queries, 2 * k + 1)
        ticks = vk.ffi.new("uint64_t[]", 2 * rounds)
        vk.vkGetQueryPoolResults(self.device, queries, 0, 2 * rounds, 16 * rounds, ticks, 8, 1 | 2)  # 64 bits, waiting
        period = self.properties.limits.timestampPeriod / 1e3
        return [(ticks[2 * k + 1] - ticks[2 * k]) * period for k in range(rounds)]

    @contextlib.contextmanager
    def _commands(self) -> Iterator[Any]:
        """Commands to record, which then run; the device is idle afterwards."""
        vk = self.vk
        info = vk.VkCommandBufferAllocateInfo(commandPool=self.pool, level=0, commandBufferCount=1)
        commands = vk.vkAllocateCommandBuffers(self.device, info)[0]
        try:
            vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo())
            yield commands
            vk.vkEndCommandBuffer(commands)
            vk.vkQueueSubmit(self.queue, 1, [vk.VkSubmitInfo(pCommandBuffers=[commands])], vk.VK_NULL_HANDLE)
            vk.vkQueueWaitIdle(self.queue)
        finally:
            vk.vkFreeCommandBuffers(self.device, self.pool, 1, [commands])

    def _everything_before(self, commands) -> None:
        """What follows waits for all that came before, and sees it; the host too."""
        vk = self.vk
        done = vk.VkMemoryBarrier(srcAccessMask=0x10000, dstAccessMask=0x18000)  # memory written; read and written
        vk.vkCmdPipelineBarrier(commands, _ALL_STAGES, _ALL_STAGES | _HOST, 0, 1, [done], 0, None, 0, None)

    def _bind(self, pipeline: Pipeline, buffers: list[Buffer], frees: contextlib.ExitStack):
        vk = self.vk
        sizes = [vk.VkDescriptorPoolSize(type=t, descriptorCount=pipeline.kinds.count(t)) for t in set(pipeline.kinds)]
        info = vk.VkDescriptorPoolCreateInfo(maxSets=1, pPoolSizes=sizes)
        pool = vk.vkCreateDescriptorPool(self.device, info, None)
        frees.callback(vk.vkDestroyDescriptorPool, self.device, pool, None)
        info = vk.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=[pipeline.descriptors])
        bound = vk.vkAllocateDescriptorSets(self.device, info)[0]
        writes = []
        for k, (buffer, kind) in enumerate(zip(buffers, pipeline.kinds)):
            whole = vk.VkDescriptorBufferInfo(buffer=buffer.handle, offset=0, range=_ALL)
            writes.append(
                vk.VkWriteDescriptorSet(
                    dstSet=bound, dstBinding=k, descriptorCount=1, descriptorType=kind, pBufferInfo=[whole]
                )
            )
        vk.vkUpdateDescriptorSets(self.device, len(writes), writes, 0, None)
        return bound

    def _pipeline_cache(self):
        """The driver's pipeline cache, begun with what earlier processes left."""
        vk, p = self.vk, self.properties
        self._cache_name = cache.key(self.name, str((p.vendorID, p.deviceID, p.driverVersion))) + ".vulkan"
        kept = cache.read(self._cache_name)
        if kept is None:
            return vk.vkCreatePipelineCache(self.device, vk.VkPipelineCacheCreateInfo(), None)
        data = vk.ffi.from_buffer(kept)
        info = vk.VkPipelineCacheCreateInfo(initialDataSize=len(kept), pInitialData=data)
        return vk.vkCreatePipelineCache(self.device, info, None)

    def _keep_cache(self) -> None:
        """Write the pipeline cache to disk; the package wraps all functions but this one."""
        ffi, get = self.vk.ffi, self.vk.lib.vkGetPipelineCacheData
        size = ffi.new("size_t*")
        if get(self.device, self.cache, size, ffi.NULL) == 0:
            data = ffi.new("char[]", size[0])
            if get(self.device, self.cache, size, data) == 0:
                cache.write(self._cache_name, bytes(ffi.buffer(data, size[0])))
