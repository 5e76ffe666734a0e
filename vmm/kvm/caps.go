package kvm

// Capability is a KVM_CAP_ number, for KVM_CHECK_EXTENSION (api.rst 4.4).
type Capability int

// The capabilities that drowse asks about, from include/uapi/linux/kvm.h.
const (
	CapIRQChip            Capability = 0
	CapUserMemory         Capability = 3
	CapSetTSSAddr         Capability = 4
	CapExtCPUID           Capability = 7
	CapNrVCPUs            Capability = 9
	CapNrMemslots         Capability = 10
	CapMPState            Capability = 14
	CapIRQRouting         Capability = 25
	CapDestroyRegion      Capability = 21
	CapUserNMI            Capability = 22
	CapAdjustClock        Capability = 39
	CapIRQFD              Capability = 32
	CapPIT2               Capability = 33
	CapPITState2          Capability = 35
	CapIOEventFD          Capability = 36
	CapSetIdentityMapAddr Capability = 37
	CapVCPUEvents         Capability = 41
	CapDebugRegs          Capability = 50
	CapXSave              Capability = 55
	CapXCRs               Capability = 56
	CapTSCControl         Capability = 60
	CapGetTSCKHz          Capability = 61
	CapMaxVCPUs           Capability = 66
	CapTSCDeadlineTimer   Capability = 72
	CapKVMClockCtrl       Capability = 76
	CapReadonlyMem        Capability = 81
	CapEnableCapVM        Capability = 98
	CapX2APICAPI          Capability = 129
	CapMaxVCPUID          Capability = 128
	CapImmediateExit      Capability = 136
	CapSyncRegs           Capability = 74
	CapExceptionPayload   Capability = 164
	CapManualDirtyLog     Capability = 168
	CapDirtyLogRing       Capability = 192
	CapExitOnEmulFailure  Capability = 204
	CapSregs2             Capability = 200
	CapXSave2             Capability = 208
	CapVMTSCControl       Capability = 214
	CapDisableQuirks2     Capability = 213
	CapDirtyLogRingAcqRel Capability = 223
)

// Flags of CapManualDirtyLog (api.rst 7.18).
const (
	DirtyLogManualProtect = 1 << 0
	DirtyLogInitiallySet  = 1 << 1
)

// Flags of a memory slot (api.rst 4.35).
const (
	MemLogDirtyPages = 1 << 0
	MemReadonly      = 1 << 1
)

// The reasons for which KVM_RUN returns (api.rst 5), as far as they occur on x86.
const (
	ExitUnknown       = 0
	ExitException     = 1
	ExitIO            = 2
	ExitHypercall     = 3
	ExitDebug         = 4
	ExitHLT           = 5
	ExitMMIO          = 6
	ExitIRQWindow     = 7
	ExitShutdown      = 8
	ExitFailEntry     = 9
	ExitIntr          = 10
	ExitInternalError = 17
	ExitSystemEvent   = 24
	ExitMemoryFault   = 39
)

// Types of KVM_EXIT_SYSTEM_EVENT.
const (
	SystemEventShutdown = 1
	SystemEventReset    = 2
	SystemEventCrash    = 3
)

// States of a vCPU (api.rst 4.38).
const (
	MPStateRunnable      = 0
	MPStateUninitialized = 1
	MPStateHalted        = 3
)
