package kvm

// Capability is a KVM_CAP_ number, for KVM_CHECK_EXTENSION (api.rst 4.4).
type Capability int

// The capabilities that drowse checks, from include/uapi/linux/kvm.h.
const (
	CapIRQChip            Capability = 0
	CapUserMemory         Capability = 3
	CapSetTSSAddr         Capability = 4
	CapExtCPUID           Capability = 7
	CapNrMemslots         Capability = 10
	CapMPState            Capability = 14
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
	CapImmediateExit      Capability = 136
	CapManualDirtyLog     Capability = 168
	CapSregs2             Capability = 200
	CapXSave2             Capability = 208
)

// Flags of CapManualDirtyLog (api.rst 7.18).
const (
	DirtyLogManualProtect = 1 << 0
	DirtyLogInitiallySet  = 1 << 1
)

// MemLogDirtyPages is a flag of a memory slot (api.rst 4.35).
const MemLogDirtyPages = 1 << 0

// The reasons for which KVM_RUN returns (api.rst 5) that drowse handles.
const (
	ExitIO            = 2
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
)
