// Numbers as people read them.

const NONE = "\u2013";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const share = (value) => (isNumber(value) ? value.toFixed(2) : NONE);

export const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;

export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : NONE);

export const megabytes = (bytes) => (isNumber(bytes) ? count(bytes / 2 ** 20) : NONE);

/** 75 -> "1:15", 3675 -> "1:01:15". */
export function clock(seconds) {
  if (!isNumber(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  const parts = [Math.floor(whole / 60) % 60, whole % 60];
  const hours = Math.floor(whole / 3600);
  if (hours) parts.unshift(hours);
  return parts.map((part, at) => (at ? String(part).padStart(2, "0") : String(part))).join(":");
}

export const signed = (value) => value.toFixed(3).replace("-", "\u2212");
