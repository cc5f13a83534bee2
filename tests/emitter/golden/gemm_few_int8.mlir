// castiron emit --kernel gemm_few --shape 16x64 --codec q5_0 --tokens 2 --numerics fast --isa avx2 --threads 2
// 360 lines, sha256 52792bf9aabead9f4f715dae05e28d29d9b5a08b64d91e0bdc2268c1a6863a73
            %17:2 = scf.for %14 = %c0 to %c2 step %c1 iter_args(%15 = %c4, %16 = %c4) -> (vector<8xf32>, vector<8xf32>) {
              %18 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%18, %14, %c0], read, locality<3>, data : memref<1x2x352xi8>
              %19 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%19, %14, %c5], read, locality<3>, data : memref<1x2x352xi8>
              %20 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%20, %14, %c6], read, locality<3>, data : memref<1x2x352xi8>
              %21 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%21, %14, %c7], read, locality<3>, data : memref<1x2x352xi8>
              %22 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%22, %14, %c8], read, locality<3>, data : memref<1x2x352xi8>
              %23 = arith.addi %9, %c1 : index
              memref.prefetch %m3[%23, %14, %c9], read, locality<3>, data : memref<1x2x352xi8>
              %24 = arith.muli %10, %c10 : index
              %25 = vector.load %m3[%9, %14, %24] : memref<1x2x352xi8>, vector<16xi8>
              %26 = vector.bitcast %25 : vector<16xi8> to vector<8xf16>
              %27 = arith.extf %26 : vector<8xf16> to vector<8xf32>
              %28 = arith.mulf %27, %c11 : vector<8xf32>
              %29 = arith.addi %12, %c1 : index
              %30 = memref.load %m2[%12, %14] : memref<2x2xi32>
              %31 = arith.muli %30, %c12 : i32
              %32 = vector.broadcast %31 : i32 to vector<8xi32>
              %33 = memref.load %m2[%29, %14] : memref<2x2xi32>
              %34 = arith.muli %33, %c12 : i32
              %35 = vector.broadcast %34 : i32 to vector<8xi32>
              %36 = arith.muli %10, %c13 : index
              %37 = arith.addi %c13, %36 : index
              %38 = vector.load %m3[%9, %14, %37] : memref<1x2x352xi8>, vector<32xi8>
              %39 = vector.bitcast %38 : vector<32xi8> to vector<8xi32>
              %40 = arith.andi %39, %c14 : vector<8xi32>
              %41 = arith.shrui %39, %c15 : vector<8xi32>
              %42 = arith.andi %41, %c16 : vector<8xi32>
              %43 = arith.shrui %39, %c17 : vector<8xi32>
              %44 = arith.andi %43, %c18 : vector<8xi32>
              %45 = arith.muli %10, %c13 : index
              %46 = arith.addi %c19, %45 : index
              %47 = vector.load %m3[%9, %14, %46] : memref<1x2x352xi8>, vector<32xi8>
              %48 = vector.bitcast %47 : vector<32xi8> to vector<8xi32>
              %49 = arith.shli %48, %c20 : vector<8xi32>
              %50 = arith.andi %49, %c21 : vector<8xi32>
// 207 lines more
              %258 = arith.addi %226, %257 : vector<16xi16>
              %259 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%258, %c35) : (vector<16xi16>, vector<16xi16>) -> vector<8xi32>
              %260 = arith.addi %143, %259 : vector<8xi32>
              %261 = arith.sitofp %253 : vector<8xi32> to vector<8xf32>
              %262 = arith.sitofp %260 : vector<8xi32> to vector<8xf32>
              %263 = arith.mulf %261, %27 : vector<8xf32>
              %264 = memref.load %m1[%12, %14] : memref<2x2xf32>
              %265 = vector.broadcast %264 : f32 to vector<8xf32>
              %266 = math.fma %263, %265, %15 : vector<8xf32>
              %267 = arith.mulf %262, %27 : vector<8xf32>
              %268 = memref.load %m1[%29, %14] : memref<2x2xf32>
              %269 = vector.broadcast %268 : f32 to vector<8xf32>
              %270 = math.fma %267, %269, %16 : vector<8xf32>
              scf.yield %266, %270 : vector<8xf32>, vector<8xf32>
            }
