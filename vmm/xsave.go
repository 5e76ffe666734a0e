package vmm

import "github.com/drowse-vm/drowse/vmm/kvm"

// Leaves and bits of the XSAVE area (SDM volume 1, chapter 13; AMD APM volume 2, 11.5).
const (
	leafStructured = 0x7
	leafXSave      = 0xd

	ecxXSave   = 1 << 26
	ecxOSXSave = 1 << 27
)

// Components of the XSAVE area, as bits of XCR0 (SDM volume 1, 13.1; volume 3, 2.6).
const (
	xcr0AVX    = 1<<1 | 1<<2 // SSE registers and the upper halves of the YMM ones
	xcr0MPX    = 1<<3 | 1<<4
	xcr0AVX512 = xcr0AVX | 1<<5 | 1<<6 | 1<<7
	xcr0PKRU   = 1 << 9
	xcr0AMX    = 1<<17 | 1<<18
	xcr0APX    = 1 << 19
	xcr0LWP    = 1 << 62
)

// stateful are the features whose registers are in a component of the XSAVE area. Without the component a kernel
// cannot save them for its programs, and the CPU refuses their instructions as invalid.
var stateful = []struct {
	function, index uint32
	name            string
	register        func(*kvm.CPUIDEntry) *uint32
	bits            uint32
	needs           uint64
}{
	{leafFeatures, 0, "FMA, AVX, F16C", ecx, 1<<12 | 1<<28 | 1<<29, xcr0AVX},
	{leafStructured, 0, "AVX2", ebx, 1 << 5, xcr0AVX},
	{leafStructured, 0, "MPX", ebx, 1 << 14, xcr0MPX},
	{leafStructured, 0, "AVX-512 F, DQ, IFMA, PF, ER, CD, BW, VL", ebx, 1<<16 | 1<<17 | 1<<21 | 1<<26 | 1<<27 | 1<<28 | 1<<30 | 1<<31, xcr0AVX512},
	{leafStructured, 0, "AVX-512 VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ", ecx, 1<<1 | 1<<6 | 1<<11 | 1<<12 | 1<<14, xcr0AVX512},
	{leafStructured, 0, "PKU, OSPKE", ecx, 1<<3 | 1<<4, xcr0PKRU},
	{leafStructured, 0, "VAES, VPCLMULQDQ", ecx, 1<<9 | 1<<10, xcr0AVX},
	{leafStructured, 0, "AVX-512 4VNNIW, 4FMAPS, VP2INTERSECT, FP16", edx, 1<<2 | 1<<3 | 1<<8 | 1<<23, xcr0AVX512},
	{leafStructured, 0, "AMX BF16, TILE, INT8", edx, 1<<22 | 1<<24 | 1<<25, xcr0AMX},
	{leafStructured, 1, "SHA512, SM3, SM4, AVX-VNNI, AVX-IFMA", eax, 1<<0 | 1<<1 | 1<<2 | 1<<4 | 1<<23, xcr0AVX},
	{leafStructured, 1, "AVX-512 BF16", eax, 1 << 5, xcr0AVX512},
	{leafStructured, 1, "AMX FP16", eax, 1 << 21, xcr0AMX},
	{leafStructured, 1, "AVX-VNNI-INT8, AVX-NE-CONVERT, AVX-VNNI-INT16", edx, 1<<4 | 1<<5 | 1<<10, xcr0AVX},
	{leafStructured, 1, "AMX COMPLEX", edx, 1 << 8, xcr0AMX},
	{leafStructured, 1, "AVX10", edx, 1 << 19, xcr0AVX512},
	{leafStructured, 1, "APX", edx, 1 << 21, xcr0APX},
	{leafExtFeatures, 0, "XOP, FMA4", ecx, 1<<11 | 1<<16, xcr0AVX},
	{leafExtFeatures, 0, "LWP", ecx, 1 << 15, xcr0LWP},
}

func eax(e *kvm.CPUIDEntry) *uint32 { return &e.EAX }
func ebx(e *kvm.CPUIDEntry) *uint32 { return &e.EBX }
func ecx(e *kvm.CPUIDEntry) *uint32 { return &e.ECX }
func edx(e *kvm.CPUIDEntry) *uint32 { return &e.EDX }

// savedFeatures returns what KVM offers without the features whose registers would not be saved. Those are the
// features whose component of the XSAVE area is missing. If there is no XSAVE or xsave is false, they are all such
// features, and the leaf that describes the area goes, too. Some programs check for AVX but not whether the kernel
// has enabled it; they then do without. The argument is not changed.
func savedFeatures(offered []kvm.CPUIDEntry, xsave bool) []kvm.CPUIDEntry {
	there := false
	var components uint64
	for i := range offered {
		switch e := &offered[i]; {
		case e.Function == leafFeatures:
			there = e.ECX&ecxXSave != 0
		case e.Function == leafXSave && e.Index == 0:
			components = uint64(e.EDX)<<32 | uint64(e.EAX)
		}
	}
	if xsave = xsave && there; !xsave {
		components = 0
	}
	out := make([]kvm.CPUIDEntry, 0, len(offered))
	for _, e := range offered {
		if !xsave {
			switch e.Function {
			case leafXSave:
				continue
			case leafFeatures:
				e.ECX &^= ecxXSave | ecxOSXSave
			}
		}
		for _, f := range stateful {
			if f.function == e.Function && f.index == e.Index && components&f.needs != f.needs {
				*f.register(&e) &^= f.bits
			}
		}
		out = append(out, e)
	}
	return out
}
