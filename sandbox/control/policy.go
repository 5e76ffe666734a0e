package control

// MaxEventLine bounds one event as JSON, in bytes.
const MaxEventLine = 64 << 10
