// Numbers as people read them.

const NONE = "\u2013";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const share = (value) => (isNumber(value) ? value.toFixed(2) : NONE);

/** A reward or a metric: three digits after the point, or three significant ones. */
export function figure(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  return size === 0 || (size >= 0.01 && size < 1e5) ? value.toFixed(3) : String(Number(value.toPrecision(3)));
}

/** The mean of the numbers among `values`; null without any. */
export function meanOf(values) {
  const known = values.filter(isNumber);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

export const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;

export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : NONE);

/** 1 -> "1 task", 1200 -> "1,200 tasks". */
export const many = (num, name) => `${count(num)} ${name}${num === 1 ? "" : "s"}`;

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
